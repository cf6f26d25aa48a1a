"""Packagings of drafts: what each means by its switches, and what is refused, with the names in the
message."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.checkpoint import inspect_checkpoint
from dspark.draft import DraftConfig, load_draft
from dspark.draft.packaging import read_draft_directory
from dspark.draft.packaging.nested import default_taps
from dspark.errors import CheckpointError
from dspark.target import TargetModel, load_target
from model_zoo import HIDDEN, draft_tensors, flat_config, nested_config, write_checkpoint, write_target
from packaging_zoo import dflash_config


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return load_target(write_target(tmp_path_factory.mktemp("target"), "llama"))


Read = Callable[..., DraftConfig]


@pytest.fixture
def read(tmp_path: Path, target: TargetModel) -> Read:
    """Writes a checkpoint, reads its configuration and loads it whole."""

    def write_and_read(config: dict[str, Any], tensors: dict[str, Tensor]) -> DraftConfig:
        path = write_checkpoint(tmp_path, config, tensors)
        found, _ = read_draft_directory(path)
        assert load_draft(path, target=target).config == found
        return found

    return write_and_read


def both(own: bool) -> Callable[..., dict[str, Any]]:
    """The config of either packaging, with switches where that packaging has them."""

    def config(**switches: Any) -> dict[str, Any]:
        return flat_config(**switches) if own else nested_config(switches)

    return config


PACKAGINGS = pytest.mark.parametrize("own", [True, False], ids=["flat", "nested"])


@PACKAGINGS
def test_both_packagings_are_recognised(own: bool, read: Read) -> None:
    found = read(both(own)(), draft_tensors(own=own))
    assert found.packaging == ("flat" if own else "nested")
    assert (found.own_embeddings, found.own_head) == (own, own)
    assert (found.gamma, found.block_size, found.training_block_size) == (5, 5, 5)
    assert not found.drop_anchor_slot, "DSpark drafts predict from the anchor's own slot"
    assert found.notes == ()


@PACKAGINGS
@pytest.mark.parametrize("rank", [0, None])
def test_no_markov_rank_is_a_plain_block_drafter(own: bool, rank: int | None, read: Read) -> None:
    tensors = draft_tensors(own=own, kind=None, confidence=None)
    found = read(both(own)(markov_rank=rank, markov_head_type=None, enable_confidence_head=False), tensors)
    assert (found.markov_rank, found.markov_head_type, found.gamma) == (0, None, 5)


@PACKAGINGS
@pytest.mark.parametrize("rank", [0, None])
def test_a_stored_markov_head_that_is_not_switched_on_is_refused(
    own: bool, rank: int | None, read: Read
) -> None:
    with pytest.raises(
        CheckpointError, match=r"markov_rank is (0|missing), but .* holds markov_head.markov_w1"
    ):
        read(both(own)(markov_rank=rank), draft_tensors(own=own))


@PACKAGINGS
def test_without_a_markov_head_the_confidence_weight_decides(own: bool, read: Read) -> None:
    switches = {"markov_rank": 0, "confidence_head_with_markov": True}
    found = read(both(own)(**switches), draft_tensors(own=own, kind=None, confidence=HIDDEN))
    assert found.enable_confidence_head
    assert not found.confidence_head_with_markov
    assert "without a Markov head" in " ".join(found.notes)
    with pytest.raises(
        CheckpointError, match=r"confidence_head.proj.weight has shape \[1, 37\].*must be \[1, 32\]"
    ):
        read(both(own)(**switches), draft_tensors(own=own, kind=None, confidence=HIDDEN + 5))


@PACKAGINGS
def test_a_confidence_weight_that_contradicts_its_switch_is_refused(own: bool, read: Read) -> None:
    with pytest.raises(CheckpointError, match=r"\[1, 32\], but with confidence_head_with_markov true"):
        read(both(own)(), draft_tensors(own=own, confidence=HIDDEN))
    with pytest.raises(CheckpointError, match=r"\[1, 37\], but with confidence_head_with_markov false"):
        read(both(own)(confidence_head_with_markov=False), draft_tensors(own=own))


def test_a_missing_confidence_with_markov_means_what_the_packaging_means(read: Read) -> None:
    switches = {"confidence_head_with_markov": None}
    assert read(flat_config(**switches), draft_tensors(own=True)).confidence_head_with_markov
    found = read(nested_config(switches), draft_tensors(own=False, confidence=HIDDEN))
    assert not found.confidence_head_with_markov
    with pytest.raises(CheckpointError, match=r"false \(the default\)"):
        read(nested_config(switches), draft_tensors(own=False))


@PACKAGINGS
def test_a_confidence_head_without_its_weight_is_refused(own: bool, read: Read) -> None:
    with pytest.raises(
        CheckpointError, match=r"enable_confidence_head is true, but tensor confidence_head.proj"
    ):
        read(both(own)(), draft_tensors(own=own, confidence=None))
    with pytest.raises(CheckpointError, match="enable_confidence_head is missing, but"):
        read(both(own)(enable_confidence_head=None), draft_tensors(own=own))


def test_the_weight_of_its_loss_says_that_there_is_a_confidence_head(read: Read) -> None:
    switches = {"enable_confidence_head": None, "confidence_head_alpha": 1.0}
    assert read(nested_config(switches), draft_tensors(own=False)).enable_confidence_head
    switches["confidence_head_alpha"] = 0.0
    assert not read(nested_config(switches), draft_tensors(own=False, confidence=None)).enable_confidence_head


@PACKAGINGS
def test_a_missing_confidence_bias_is_zero_and_inspect_says_so(
    own: bool, read: Read, tmp_path: Path, target: TargetModel
) -> None:
    tensors = draft_tensors(own=own)
    del tensors["confidence_head.proj.bias"]
    read(both(own)(), tensors)
    head = load_draft(tmp_path, target=target).confidence_head
    assert head is not None
    assert torch.equal(head.proj.bias, torch.zeros(1, dtype=torch.float64))
    assert any("no bias: zero" in warning for warning in inspect_checkpoint(tmp_path)["warnings"])


@pytest.mark.parametrize(
    "change",
    [
        {"markov_rank": 5},
        {"dspark_markov_rank": 5},
        {"dspark_config": {"markov_rank": 5, "dspark_mask_token_id": 3}},
        {"mask_token_id": 3, "target_layer_ids": [0, 1, 2]},
    ],
)
def test_a_switch_spelled_twice_with_one_value_is_fine(change: dict[str, Any], read: Read) -> None:
    assert read(nested_config(**change), draft_tensors(own=False)).markov_rank == 5
    assert read(flat_config(**change), draft_tensors(own=True)).markov_rank == 5


@pytest.mark.parametrize(
    ("change", "places"),
    [
        ({"markov_rank": 6}, "markov_rank is 6 but dflash_config.markov_rank is 5"),
        ({"dspark_markov_rank": 6}, "dspark_markov_rank is 6 but dflash_config.markov_rank is 5"),
        (
            {"dspark_config": {"mask_token_id": 4}},
            "dflash_config.mask_token_id is 3 but dspark_config.mask_token_id is 4",
        ),
        ({"target_layer_ids": [0, 1]}, r"target_layer_ids is \(0, 1\) but dflash_config.target_layer_ids"),
        ({"enable_confidence_head": False}, "enable_confidence_head is False but dflash_config.enable_conf"),
    ],
)
def test_a_switch_spelled_twice_with_two_values_is_refused(
    change: dict[str, Any], places: str, read: Read
) -> None:
    with pytest.raises(CheckpointError, match=places):
        read(nested_config(**change), draft_tensors(own=False))


def test_switches_may_stand_in_any_of_the_places(read: Read) -> None:
    config = nested_config({"markov_rank": None, "mask_token_id": None}, dspark_markov_rank=5)
    config["dspark_config"] = {"mask_token_id": 3}
    found = read(config, draft_tensors(own=False))
    assert (found.markov_rank, found.mask_token_id) == (5, 3)


@PACKAGINGS
def test_the_projection_is_sized_from_the_taps_not_from_the_layers(own: bool, read: Read) -> None:
    taps = [-1, 0, 1, 2]
    config = both(own)(target_layer_ids=taps)
    config["num_hidden_layers"] = 3
    found = read(config, draft_tensors(own=own, taps=4, layers=3))
    assert found.target_layer_ids == (-1, 0, 1, 2)
    assert found.target_hidden_size == HIDDEN


def test_only_the_flat_format_demands_that_taps_ascend(read: Read) -> None:
    found = read(nested_config({"target_layer_ids": [2, 0, 1]}), draft_tensors(own=False))
    assert found.target_layer_ids == (2, 0, 1), "the order is that of the projection's columns"
    with pytest.raises(CheckpointError, match="must ascend"):
        read(flat_config(target_layer_ids=[2, 0, 1]), draft_tensors(own=True))


def test_missing_taps_follow_the_formula_of_the_nested_format(read: Read, tmp_path: Path) -> None:
    config = nested_config({"target_layer_ids": None}, num_hidden_layers=3, num_target_layers=7)
    write_checkpoint(tmp_path, config, draft_tensors(own=False, layers=3))
    found, _ = read_draft_directory(tmp_path)
    assert found.target_layer_ids == (1, 2, 4)
    assert "target_layer_ids is missing: [1, 2, 4]" in " ".join(inspect_checkpoint(tmp_path)["warnings"])
    with pytest.raises(CheckpointError, match="without num_target_layers"):
        read(nested_config({"target_layer_ids": None}, num_target_layers=None), draft_tensors(own=False))
    with pytest.raises(CheckpointError, match="the flat format has no default"):
        read(flat_config(target_layer_ids=None), draft_tensors(own=True))


def test_the_formula_gives_the_published_taps(tmp_path: Path) -> None:
    from dspark.checkpoint.config_file import ConfigFile
    from dspark.draft.packaging.switches import Switches

    def taps(target_layers: int, draft_layers: int) -> tuple[int, ...]:
        values = {"num_target_layers": target_layers, "num_hidden_layers": draft_layers}
        config = ConfigFile(tmp_path, values)
        return default_taps(config, Switches(config))

    assert taps(36, 5) == (1, 9, 17, 25, 33)
    assert taps(28, 1) == (14,)


def test_heads_of_older_nested_checkpoints_are_found(read: Read) -> None:
    tensors = draft_tensors(own=False, kind="rnn")
    older = {
        f"logit_head.{name}" if name.startswith(("markov_head", "confidence_head")) else name: tensor
        for name, tensor in tensors.items()
    }
    assert read(nested_config({"markov_head_type": "rnn"}), older).markov_head_type == "rnn"


def test_defaults_of_the_markov_type_differ_by_packaging(read: Read) -> None:
    found = read(nested_config({"markov_head_type": None}), draft_tensors(own=False))
    assert found.markov_head_type == "vanilla"
    assert "markov_head_type is missing" in " ".join(found.notes)
    with pytest.raises(CheckpointError, match="markov_rank is 5, but markov_head_type is missing"):
        read(flat_config(markov_head_type=None), draft_tensors(own=True))


def test_without_architectures_the_content_decides(read: Read) -> None:
    assert read(flat_config(architectures=None), draft_tensors(own=True)).packaging == "flat"
    assert read(nested_config(architectures=None), draft_tensors(own=False)).packaging == "nested"
    by_switch = nested_config({"projector_type": None}, architectures=None)
    assert read(by_switch, draft_tensors(own=False)).packaging == "nested"


def test_two_architectures_are_read_by_their_content(read: Read) -> None:
    config = nested_config(architectures=["DFlashDraftModel", "DSparkDraftModel"])
    assert read(config, draft_tensors(own=False)).packaging == "nested"
    config = nested_config(architectures=["DFlashDraftModel"])  # projector_type is dspark
    assert read(config, draft_tensors(own=False)).packaging == "nested"


def test_the_table_of_tensors_is_that_of_the_modules(tmp_path: Path) -> None:
    from dspark.draft import DSparkDraftModel
    from dspark.draft.parameters import draft_shapes

    for kind in ("vanilla", "gated", "rnn"):
        config = flat_config(markov_head_type=kind, attention_bias=True)
        write_checkpoint(tmp_path, config, draft_tensors(own=True, kind=kind, bias=True))
        found, _ = read_draft_directory(tmp_path)
        shapes = {name: tuple(p.shape) for name, p in DSparkDraftModel(found).named_parameters()}
        assert draft_shapes(found) == shapes


@pytest.mark.parametrize(
    ("switches", "named"),
    [
        ({"projector_type": "domino"}, "projector_type is 'domino'; supported are dflash, dspark"),
        ({"shift_label": True}, "shift_label is true, but projector_type is None"),
    ],
)
def test_other_projectors_are_refused(read: Read, switches: dict[str, Any], named: str) -> None:
    """They came as a DFlash draft, and would draft one token too far with half of their tensors unused."""
    config = dflash_config()
    config["dflash_config"] |= switches
    with pytest.raises(CheckpointError, match=named):
        read(config, draft_tensors(own=False, kind=None, confidence=None))


def test_specforges_export_for_sglang_is_nested(read: Read) -> None:
    config = nested_config()
    config |= {"architectures": ["Qwen3DSparkModel"], **config["dflash_config"]}
    found = read(config, draft_tensors(own=False))
    assert found.packaging == "nested" and not found.drop_anchor_slot
    assert found == read(nested_config(), draft_tensors(own=False))


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_model_optimizer_s_export_is_nested(kind: str, tmp_path: Path, target: TargetModel) -> None:
    """Its names of tensors, its switch of the confidence head, and `shift_label`: slot 0 predicts."""
    heads = {"markov_head_type": kind, "confidence_head_with_markov": True}
    tensors = draft_tensors(own=False, kind=kind)
    ours = load_draft(write_checkpoint(tmp_path / "ours", nested_config(heads), tensors), target=target)
    config = nested_config({"markov_head_type": kind}, architectures=["DFlashDraftModel"])
    switches = config["dflash_config"]
    for key in ("enable_confidence_head", "confidence_head_with_markov"):
        del switches[key]
    switches |= {"use_confidence_head": True, "shift_label": True}
    renamed = {
        name.replace("confidence_head.proj.", "confidence_proj.").removeprefix("markov_head."): tensor
        for name, tensor in tensors.items()
    }
    theirs = load_draft(write_checkpoint(tmp_path / "theirs", config, renamed), target=target)
    assert (theirs.config.packaging, theirs.config.gamma) == ("nested", ours.config.gamma)
    assert theirs.config.confidence_head_with_markov and not theirs.config.drop_anchor_slot
    for one, other in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert one[0] == other[0] and torch.equal(one[1], other[1])


def test_a_partial_rotation_copied_from_the_target_is_left_unread(read: Read) -> None:
    """DeepSpec copies the target's key and rotates whole heads."""
    config = flat_config(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.25})
    found = read(config, draft_tensors(own=True))
    assert found.rope == read(flat_config(rope_parameters={"rope_theta": 1e4}), draft_tensors(own=True)).rope
    assert "partial_rotary_factor 0.25 is copied from the target: trainers rotate whole heads" in found.notes


def test_tensors_that_nothing_uses_are_named_when_a_draft_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = draft_tensors(own=True)
    leftovers = {"verifier_norm.weight": torch.ones(2), "rotary_emb.inv_freq": torch.ones(2)}
    load_draft(write_checkpoint(tmp_path / "whole", flat_config(), tensors | leftovers), target=None)
    assert not caplog.messages
    path = write_checkpoint(tmp_path / "more", flat_config(), tensors | {"prefix_gru.weight": torch.ones(2)})
    load_draft(path, target=None)
    assert caplog.messages == [
        f"{path}: 1 tensors of the draft are not used: prefix_gru.weight; if it needs them, next to none of "
        "its drafts are accepted"
    ]
