"""The draft against its formulas written plainly: heads, context cache, slots, windows, borrowed
embeddings."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.checkpoint.load import ParameterReader
from dspark.draft import DSparkDraftModel, load_draft
from dspark.draft.packaging import read_draft_directory
from dspark.errors import CheckpointError, ConfigError
from dspark.target import TargetModel, load_target
from model_zoo import (
    HIDDEN,
    VOCAB,
    draft_tensors,
    flat_config,
    nested_config,
    target_config,
    target_tensors,
    write_checkpoint,
    write_target,
)
from plain_draft import LINEAR, WINDOW, YARN, plain_block, taps_of

EXACT = 1e-10


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return load_target(write_target(tmp_path_factory.mktemp("target"), "qwen3"))


CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "yarn": {"rope_parameters": YARN},
    "linear": {"rope_parameters": LINEAR},
    "window": WINDOW,
    "bias": {"attention_bias": True},
    "block of one": {"block_size": 1},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("packaging", ["flat", "nested"])
def test_blocks_equal_the_plain_formula(
    case: str, packaging: str, target: TargetModel, tmp_path: Path
) -> None:
    """Context in pieces, several rounds, at positions beyond the original context; flat and nested alike."""
    own = packaging == "flat"
    config = flat_config(**CASES[case]) if own else nested_config(**CASES[case])
    tensors = draft_tensors(own=own, bias=case == "bias")
    draft = load_draft(write_checkpoint(tmp_path, config, tensors), target=target)
    theirs = target_tensors(target_config("qwen3"))
    embeddings = tensors["embed_tokens.weight"] if own else theirs["model.embed_tokens.weight"]
    head = tensors["lm_head.weight"] if own else theirs["lm_head.weight"]
    context, taps = draft.new_context(), taps_of(90)
    with torch.inference_mode():
        for start, stop in ((0, 1), (1, 4), (4, 5), (5, 90)):
            draft.extend([(context, stop - start)], taps[start:stop])
            hidden, base = draft.block([7], [context])
            # The flat format's own evaluation applies no window.
            rule = "none" if own else "sliding"
            expected = plain_block(tensors, config, taps[:stop], 7, embeddings, rule)
            # The rotation's angles are float32 here and there, hence not EXACT.
            assert (hidden - expected).abs().max() < 1e-6
            assert (base - expected @ head.T).abs().max() < 1e-5
            assert context.length == stop


def make(
    tmp_path: Path, target: TargetModel | None, kind: str | None = "vanilla", **changes: Any
) -> DSparkDraftModel:
    confidence = HIDDEN + 5 if kind is not None else None
    switches: dict[str, Any] = {"markov_head_type": kind}
    if kind is None:
        switches |= {"markov_rank": 0, "enable_confidence_head": False}
    tensors = draft_tensors(own=True, kind=kind, confidence=confidence)
    return load_draft(write_checkpoint(tmp_path, flat_config(**switches, **changes), tensors), target=target)


def test_what_read_the_weights_is_gone_when_the_draft_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[weakref.ref[ParameterReader]] = []

    class Watched(ParameterReader):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            readers.append(weakref.ref(self))

    monkeypatch.setattr("dspark.draft.load.ParameterReader", Watched)
    draft = make(tmp_path, None)
    gc.collect()
    assert [reader() for reader in readers] == [None] and draft.config.own_head


def test_a_batch_equals_each_request_alone_and_block_rows_are_never_kept(tmp_path: Path) -> None:
    draft = make(tmp_path, None)
    lengths = (1, 7, 40)
    contexts = [draft.new_context() for _ in lengths]
    taps = [taps_of(n, seed=n) for n in lengths]
    with torch.inference_mode():
        draft.extend(list(zip(contexts, lengths, strict=True)), torch.cat(taps))
        first, _ = draft.block([4, 5, 6], contexts)
        again, base = draft.block([4, 5, 6], contexts)
        assert torch.equal(first, again)
        assert base.shape == (3 * 5, VOCAB)
        for index, n in enumerate(lengths):
            alone = draft.new_context()
            draft.extend([(alone, n)], taps[index])
            hidden, _ = draft.block([4 + index], [alone])
            assert (hidden - first[5 * index : 5 * index + 5]).abs().max() < EXACT
            assert alone.length == contexts[index].length == n
        grown = [(contexts[0], 2), (contexts[1], 0), (contexts[2], 3)]
        draft.extend(grown, taps_of(5, seed=9))
    assert [context.length for context in contexts] == [3, 7, 43]


def test_the_context_survives_growing(tmp_path: Path) -> None:
    draft = make(tmp_path, None)
    taps = taps_of(300)
    whole, pieces = draft.new_context(), draft.new_context()
    with torch.inference_mode():
        draft.extend([(whole, 300)], taps)
        for piece in taps.split(7):
            draft.extend([(pieces, len(piece))], piece)
            draft.block([3], [pieces])
        difference = draft.block([3], [whole])[0] - draft.block([3], [pieces])[0]
    assert difference.abs().max() < EXACT


def test_the_frozen_and_the_differentiable_model_agree(tmp_path: Path) -> None:
    frozen = make(tmp_path, None)
    config, weights = read_draft_directory(tmp_path)
    from safetensors.torch import load_file

    plain = DSparkDraftModel(config).to(torch.float64)
    plain.load_state_dict(load_file(tmp_path / "model.safetensors"))
    outputs = []
    for model in (frozen, plain):
        with torch.no_grad():
            context = model.new_context()
            model.extend([(context, 20)], taps_of(20))
            outputs.append(model.block([9], [context]))
    assert (outputs[0][0] - outputs[1][0]).abs().max() < EXACT
    assert (outputs[0][1] - outputs[1][1]).abs().max() < EXACT
    assert set(plain.state_dict()) == set(weights.tensors), "the modules carry the published names"


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn", None])
def test_every_head_loads(kind: str | None, tmp_path: Path) -> None:
    draft = make(tmp_path, None, kind)
    found = None if draft.markov_head is None else draft.markov_head.kind
    assert found == kind
    assert (draft.confidence_head is None) == (kind is None)


def test_the_block_is_as_wide_as_the_checkpoint_says_and_may_be_widened_as_trained(
    target: TargetModel, tmp_path: Path
) -> None:
    path = write_checkpoint(
        tmp_path, nested_config(block_size=7, training_block_size=16), draft_tensors(own=False)
    )
    taps = taps_of(12)

    def block(size: int | None) -> Tensor:
        draft = load_draft(path, target=target, block_size=size)
        context = draft.new_context()
        with torch.inference_mode():
            draft.extend([(context, 12)], taps)
            return draft.block([2], [context])[0]

    seven = block(None)
    assert seven.shape[0] == 7
    assert torch.equal(block(1), seven)
    assert torch.equal(block(3), seven)
    assert block(9).shape[0] == 9
    for wrong in (0, 17, 20):
        with pytest.raises(ConfigError, match=rf"block_size {wrong} is out of range.*1 to 16"):
            block(wrong)


def test_without_training_block_size_the_block_cannot_be_widened(target: TargetModel, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, nested_config(), draft_tensors(own=False))
    with pytest.raises(ConfigError, match="1 to 5"):
        load_draft(path, target=target, block_size=6)


def test_a_borrowing_draft_needs_a_target_that_fits(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "draft", nested_config(), draft_tensors(own=False))
    with pytest.raises(CheckpointError, match="no embeddings of its own"):
        load_draft(path, target=None)
    for name, changes, message in (
        ("vocabulary", {"vocab_size": 62}, "vocab_size is 61 in the draft, 62 in the target"),
        ("layers", {"num_hidden_layers": 5}, "num_target_layers is 4 in the draft, 5 in the target"),
        ("width", {"hidden_size": 40, "head_dim": 8}, "width of a tap is 32 in the draft, 40 in the target"),
    ):
        other = load_target(write_target(tmp_path / name, "llama", **changes))
        with pytest.raises(ConfigError, match=message):
            load_draft(path, target=other)
    deep = write_checkpoint(
        tmp_path / "deep",
        nested_config({"target_layer_ids": [0, 1, 3]}, num_target_layers=None),
        draft_tensors(own=False),
    )
    with pytest.raises(ConfigError, match="taps layer 3"):
        load_draft(deep, target=load_target(write_target(tmp_path / "four", "llama")))


def test_the_drafts_own_head_is_used_even_if_the_targets_differs(target: TargetModel, tmp_path: Path) -> None:
    tensors = draft_tensors(own=True)
    del tensors["embed_tokens.weight"]
    draft = load_draft(write_checkpoint(tmp_path, nested_config(), tensors), target=target)
    rows = taps_of(3, width=HIDDEN)
    with torch.inference_mode():
        assert (draft.project(rows) - rows @ tensors["lm_head.weight"].T).abs().max() < EXACT
        assert torch.equal(draft.embed(torch.tensor([5])), target.embed(torch.tensor([5])))


def test_a_tied_target_lends_its_embeddings_as_head(tmp_path: Path) -> None:
    tied = load_target(write_target(tmp_path / "target", "llama", tie_word_embeddings=True))
    path = write_checkpoint(tmp_path / "draft", nested_config(), draft_tensors(own=False))
    draft = load_draft(path, target=tied)
    rows = taps_of(3, width=HIDDEN)
    with torch.inference_mode():
        assert (draft.project(rows) - rows @ tied.embedding_weight.T).abs().max() < EXACT


@pytest.mark.parametrize("tied", [True, False])
def test_a_draft_may_compute_in_another_dtype_than_its_target(tmp_path: Path, tied: bool) -> None:
    wide = load_target(write_target(tmp_path / "target", "llama", tie_word_embeddings=tied))
    path = write_checkpoint(tmp_path / "draft", nested_config(), draft_tensors(own=False))
    taps = taps_of(5)
    exact, narrow = (load_draft(path, target=wide, dtype=dtype) for dtype in ("auto", torch.float32))
    assert exact.dtype == torch.float64 and narrow.dtype == torch.float32
    outcomes = []
    with torch.inference_mode():
        for draft in (exact, narrow):
            context = draft.new_context()
            draft.extend([(context, 5)], taps)
            outcomes.append([x.double() for x in draft.block([3], [context])])
    for a, b in zip(*outcomes, strict=True):
        assert a.shape == b.shape and (a - b).abs().max() < 1e-4 * a.abs().max()


def test_auto_never_makes_a_draft_wider_than_its_target(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "draft", nested_config(), draft_tensors(own=False))
    single = load_target(write_target(tmp_path / "target", "llama"), dtype=torch.float32)
    assert load_draft(path, target=single).dtype == torch.float32


def test_each_model_keeps_its_own_rotation(target: TargetModel, tmp_path: Path) -> None:
    """YaRN in the draft and none in the target, and the other way round: neither leaks into the other."""
    yarn_target = load_target(write_target(tmp_path / "target", "qwen3", rope_parameters=YARN))
    path = write_checkpoint(tmp_path / "plain", nested_config(), draft_tensors(own=False))
    yarn_path = write_checkpoint(
        tmp_path / "yarn", nested_config(rope_parameters=YARN), draft_tensors(own=False)
    )

    def block(draft_path: Path, model: TargetModel) -> Tensor:
        draft = load_draft(draft_path, target=model)
        context = draft.new_context()
        with torch.inference_mode():
            draft.extend([(context, 30)], taps_of(30))
            return draft.block([2], [context])[0]

    assert torch.equal(block(path, target), block(path, yarn_target))
    assert torch.equal(block(yarn_path, target), block(yarn_path, yarn_target))
    assert (block(path, target) - block(yarn_path, target)).abs().max() > 1e-3


def test_taps_that_do_not_add_up_are_refused(tmp_path: Path) -> None:
    draft = make(tmp_path, None)
    with pytest.raises(ConfigError, match="2 rows of taps"):
        draft.extend([(draft.new_context(), 3)], taps_of(2))
