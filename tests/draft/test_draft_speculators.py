"""The speculators packaging and plain DFlash: slots, taps, windows, and what contradicts itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.checkpoint import inspect_checkpoint
from dspark.draft import DSparkDraftModel, load_draft
from dspark.draft.packaging.slots import UNSAID
from dspark.errors import CheckpointError, ConfigError
from dspark.target import load_target
from model_zoo import (
    HIDDEN,
    draft_tensors,
    flat_config,
    nested_config,
    target_config,
    target_tensors,
    write_checkpoint,
    write_target,
)
from packaging_zoo import dflash_config, speculators_config
from plain_draft import WINDOW, YARN, plain_block, taps_of

Load = Callable[..., DSparkDraftModel]
PLAIN: dict[str, Any] = {"kind": None, "confidence": None}


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Writes a draft and loads it for the zoo's target."""
    target = load_target(write_target(tmp_path / "target", "qwen3"))

    def write_and_load(
        config: dict[str, Any], tensors: dict[str, Tensor], **options: Any
    ) -> DSparkDraftModel:
        return load_draft(write_checkpoint(tmp_path / "draft", config, tensors), target=target, **options)

    return write_and_load


def block(draft: DSparkDraftModel, context: int = 20) -> tuple[Tensor, Tensor]:
    cache = draft.new_context()
    with torch.inference_mode():
        draft.extend([(cache, context)], taps_of(context))
        return draft.block([9], [cache])


def test_speculators_and_flat_are_the_same_draft(load: Load) -> None:
    tensors = draft_tensors(own=True)
    found = load(speculators_config(), tensors)
    assert (found.config.packaging, found.config.architecture) == ("speculators", "DSparkSpeculator")
    assert found.config.target_layer_ids == (0, 1, 2), "aux_hidden_state_layer_ids counts from the embeddings"
    assert (found.config.gamma, found.config.drop_anchor_slot, found.config.notes) == (5, False, ())
    assert found.config.markov_head_type == "vanilla" and found.config.enable_confidence_head
    for ours, flat in zip(block(found), block(load(flat_config(), tensors)), strict=True):
        assert torch.equal(ours, flat)


def test_the_embeddings_are_number_zero_of_speculators(load: Load) -> None:
    found = load(speculators_config(aux_hidden_state_layer_ids=[0, 2, 1]), draft_tensors(own=False))
    assert found.config.target_layer_ids == (-1, 1, 0)


@pytest.mark.parametrize(
    ("kind", "said", "drops"),
    [
        ("dspark", None, False),
        ("dspark", True, False),
        ("dspark", False, True),
        ("dflash", None, True),
        ("dflash", True, False),
        ("dflash", False, True),
    ],
)
def test_sample_from_anchor_and_its_defaults(kind: str, said: bool | None, drops: bool, load: Load) -> None:
    tensors = draft_tensors(own=False) if kind == "dspark" else draft_tensors(own=False, **PLAIN)
    found = load(speculators_config(kind, sample_from_anchor=said), tensors)
    assert (found.config.drop_anchor_slot, found.config.gamma) == (drops, 4 if drops else 5)
    assert ("sample_from_anchor is missing" in " ".join(found.config.notes)) == (said is None)


@pytest.mark.parametrize(
    ("tokens", "said", "drops"),
    [(5, None, False), (4, None, True), (3, None, False), (4, True, False), (5, False, True)],
)
def test_what_is_proposed_says_whether_slot_0_predicts(
    tokens: int, said: bool | None, drops: bool, load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    """Drafts that are older than the key `sample_from_anchor` dropped slot 0, also those of DSpark."""
    proposal = {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}]}
    config = speculators_config(sample_from_anchor=said, speculators_config=proposal)
    found = load(config, draft_tensors(own=False)).config
    assert (found.drop_anchor_slot, found.gamma) == (drops, 4 if drops else 5)
    assert any(UNSAID[True] in message for message in caplog.messages) == (tokens == 3)


@pytest.mark.parametrize("name", ["DSparkDraftModel", "Qwen3DSparkModel"])
def test_a_speculators_draft_may_have_another_engine_s_name(name: str, load: Load) -> None:
    named = speculators_config(architectures=[name])
    assert load(named, draft_tensors(own=False)).config.packaging == "speculators"


def test_architectures_may_say_what_kind_it_is(load: Load) -> None:
    config = speculators_config(speculators_model_type=None, sample_from_anchor=None)
    assert not load(config, draft_tensors(own=False)).config.drop_anchor_slot
    saved = speculators_config("dflash", architectures=["DFlashDraftModel"])
    assert load(saved, draft_tensors(own=False, **PLAIN)).config.drop_anchor_slot


def test_every_slot_behind_a_dropped_one_is_used_in_order(load: Load) -> None:
    tensors = draft_tensors(own=False, **PLAIN)
    nothing = {"markov_rank": 0, "markov_head_type": None, "enable_confidence_head": False}
    whole_hidden, whole_base = block(load(nested_config(nothing), tensors))
    for config in (dflash_config(), speculators_config("dflash")):
        draft = load(config, tensors)
        hidden, base = block(draft)
        assert (draft.config.gamma, draft.config.state_rows) == (4, 4)
        assert torch.equal(hidden, whole_hidden[1:])
        assert (base - whole_base[1:]).abs().max() < 1e-12


def test_plain_dflash_by_content(load: Load) -> None:
    """z-lab's drop slot 0; a DSpark projector, DSpark's heads or DeepSpec's flat baselines do not."""
    tensors = draft_tensors(own=False, **PLAIN)
    found = load(dflash_config(), tensors)
    assert (found.config.packaging, found.config.gamma, found.config.drop_anchor_slot) == ("dflash", 4, True)
    assert load(dflash_config(architectures=None), tensors).config.packaging == "dflash"
    assert load(dflash_config(architectures=["Qwen3DFlashDraftModel"]), tensors).config == found.config
    for key in ("sample_from_anchor", "query_zero_predicts_next"):
        assert not load(dflash_config(**{key: True}), tensors).config.drop_anchor_slot
    nothing = {"markov_rank": 0, "enable_confidence_head": False}
    for anchor_first in (
        nested_config(nothing, architectures=["DFlashDraftModel"]),
        nested_config({**nothing, "projector_type": None}),
    ):
        assert load(anchor_first, tensors).config.gamma == 5
    assert load(nested_config({"sample_from_anchor": False}), draft_tensors(own=False)).config.gamma == 4
    deepspec = flat_config(markov_rank=0, markov_head_type=None, enable_confidence_head=False, block_size=7)
    assert load(deepspec, draft_tensors(own=True, **PLAIN)).config.gamma == 7
    assert load(deepspec | {"sample_from_anchor": False}, draft_tensors(own=True, **PLAIN)).config.gamma == 6


def test_a_dropped_slot_counts_in_the_width_that_can_be_asked_for(load: Load) -> None:
    config, tensors = dflash_config(training_block_size=9), draft_tensors(own=False, **PLAIN)
    assert load(config, tensors, block_size=8).config.gamma == 8
    assert load(config, tensors, block_size=3).config.gamma == 4
    with pytest.raises(ConfigError, match="trained to draft 1 to 8 tokens"):
        load(config, tensors, block_size=9)


def test_a_recurrent_head_keeps_the_state_of_a_dropped_slot(load: Load) -> None:
    config = speculators_config(sample_from_anchor=False, markov_head_type="rnn")
    draft = load(config, draft_tensors(own=False, kind="rnn"))
    hidden, base = block(draft)
    assert (draft.config.gamma, draft.config.state_rows) == (4, 5)
    assert (hidden.shape, base.shape[0]) == ((5, HIDDEN), 4)
    with torch.inference_mode():
        assert (draft.project(hidden[1:]) - base).abs().max() < 1e-12


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "causal": (WINDOW, "anchored"),
    "not causal": (WINDOW | {"sliding_window_non_causal": True}, "anchored, bidirectional"),
    "yarn": ({"rope_parameters": YARN | {"beta_fast": 20.0, "beta_slow": 2.0}}, "anchored"),
    "a window of one": (WINDOW | {"sliding_window": 1}, "anchored"),
    "a window as wide as the context": (WINDOW | {"sliding_window": 90}, "anchored"),
}


@pytest.mark.parametrize("case", CASES)
def test_windows_of_speculators(case: str, load: Load) -> None:
    """Bounded by the anchor for every row of the block, against the plain formula; in pieces past the
    window."""
    changes, rule = CASES[case]
    tensors = draft_tensors(own=False)
    draft = load(speculators_config(**changes), tensors)
    plain = nested_config(**{k: v for k, v in changes.items() if k != "sliding_window_non_causal"})
    embeddings = target_tensors(target_config("qwen3"))["model.embed_tokens.weight"]
    context, taps = draft.new_context(), taps_of(90)
    with torch.inference_mode():
        for start, stop in ((0, 1), (1, 4), (4, 6), (6, 90)):
            draft.extend([(context, stop - start)], taps[start:stop])
            hidden, _ = draft.block([7], [context])
            expected = plain_block(tensors, plain, taps[:stop], 7, embeddings, rule)
            assert (hidden - expected).abs().max() < 1e-6, stop


def test_the_windows_differ(load: Load) -> None:
    """Else the tests of them would prove nothing."""
    tensors = draft_tensors(own=False)
    outcomes = [
        block(load(config, tensors))[0]
        for config in (
            nested_config(**WINDOW),
            speculators_config(**WINDOW),
            speculators_config(**WINDOW, sliding_window_non_causal=True),
            speculators_config(),
        )
    ]
    for index, one in enumerate(outcomes):
        assert all((one - other).abs().max() > 1e-3 for other in outcomes[:index])


def test_the_flat_format_has_no_window_and_inspect_says_so(load: Load, tmp_path: Path) -> None:
    tensors = draft_tensors(own=True)
    assert torch.equal(block(load(flat_config(**WINDOW), tensors))[0], block(load(flat_config(), tensors))[0])
    found = inspect_checkpoint(write_checkpoint(tmp_path / "again", flat_config(**WINDOW), tensors))
    assert any("no window" in warning for warning in found["warnings"])
    assert found["sliding_windows"] is None


def test_a_draft_of_other_sizes_than_its_target(tmp_path: Path) -> None:
    """Own embeddings and head: only the taps have the target's width. Heads and layers are the draft's
    own."""
    target = load_target(write_target(tmp_path / "target", "llama", hidden_size=40, head_dim=20))
    tensors = draft_tensors(own=True)
    tensors["fc.weight"] = torch.randn(HIDDEN, 3 * 40, dtype=torch.float64) / 11
    for config in (speculators_config(target_hidden_size=40), flat_config()):
        path = write_checkpoint(tmp_path / config["architectures"][0], config, tensors)
        draft = load_draft(path, target=target)
        assert (draft.config.target_hidden_size, draft.config.hidden_size) == (40, HIDDEN)
        context = draft.new_context()
        with torch.inference_mode():
            _, taps = target(torch.arange(6), [(target.new_cache(), 6)], draft.config.target_layer_ids)
            assert taps is not None
            draft.extend([(context, 6)], taps)
            assert draft.block([3], [context])[1].isfinite().all()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (speculators_config(transformer_layer_config=None), "transformer_layer_config is missing"),
        (speculators_config(aux_hidden_state_layer_ids=None), "aux_hidden_state_layer_ids is missing"),
        (speculators_config(aux_hidden_state_layer_ids=[-1, 1, 2]), "has a negative entry; 0 is the embedd"),
        (speculators_config(target_hidden_size=16), "target_hidden_size is 16, but .* has 32 columns"),
        (
            speculators_config("dflash", architectures=["DSparkSpeculator"]),
            "speculators_model_type is 'dflash' but architectures is 'dspark'",
        ),
        (speculators_config(speculators_model_type="eagle3", architectures=None), "found 'eagle3'"),
        (
            speculators_config(speculators_model_type=None, architectures=None),
            "neither speculators_model_type nor",
        ),
        (speculators_config(mask_token_id=None), "mask_token_id is missing"),
        (speculators_config(vocab_size=None), "transformer_layer_config.vocab_size is missing"),
        (speculators_config(hidden_size="32"), "transformer_layer_config.hidden_size must be a positive int"),
        (speculators_config(hidden_act="gelu"), "transformer_layer_config.hidden_act is 'gelu'"),
        (speculators_config(markov_head_type=None), "markov_rank is 5, but markov_head_type is missing"),
        (speculators_config(markov_rank=None), "markov_rank is missing, but .* holds markov_head.markov_w1"),
        (
            speculators_config(rope_theta=5e4),
            "transformer_layer_config.rope_theta is 50000.0 but "
            "transformer_layer_config.rope_parameters.rope",
        ),
        (speculators_config(layer_types=["sliding_attention"] * 2), "sliding_window is missing"),
        (dflash_config(block_size=1), "block_size is 1, but the anchor's slot predicts nothing"),
    ],
)
def test_contradictions_are_refused(config: dict[str, Any], message: str, load: Load) -> None:
    plain = config.get("architectures") == ["DFlashDraftModel"]
    with pytest.raises(CheckpointError, match=message):
        load(config, draft_tensors(own=False, **PLAIN) if plain else draft_tensors(own=False))
