"""Reduced draft vocabularies: the map, and that text keeps its law and its equality under every rule and
head."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark import DSparkDecoder, SamplingParams
from dspark.checkpoint import inspect_checkpoint
from dspark.draft import DSparkDraftModel, load_draft
from dspark.errors import CheckpointError
from dspark.serve.runner import Runner
from dspark.target import load_target
from model_zoo import HIDDEN, VOCAB, draft_tensors, flat_config, nested_config, write_checkpoint
from model_zoo import write_target as write_zoo_target
from packaging_zoo import SOME, as_speculators, dflash_config, reduced, speculators_config
from plain_draft import taps_of
from plain_law import ALPHA, LENGTH, PROMPTS, law, p_value, sampled
from random_pair import write_draft, write_target

WIDE = 23
TOKENS = (1, 2, 4, 7, 8, 9, 12, 15, 16, 20, 22)
HEADS = ("vanilla", "gated", "rnn", None)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_target(write_zoo_target(tmp_path_factory.mktemp("target"), "qwen3"))


def block(path: Path, target: Any) -> tuple[DSparkDraftModel, Tensor, Tensor]:
    draft = load_draft(path, target=target)
    context = draft.new_context()
    with torch.inference_mode():
        draft.extend([(context, 20)], taps_of(20))
        return draft, *draft.block([9], [context])


@pytest.mark.parametrize("own", [True, False], ids=["own head", "the target's head"])
def test_base_logits_are_the_columns_of_the_whole_drafts(own: bool, target: Any, tmp_path: Path) -> None:
    tensors = draft_tensors(own=own)
    whole = write_checkpoint(tmp_path / "whole", speculators_config(), tensors)
    config = speculators_config(draft_vocab_size=len(SOME))
    part = write_checkpoint(tmp_path / "part", config, reduced(tensors))
    _, hidden, base = block(whole, target)
    draft, same, columns = block(part, target)
    assert draft.config.reduced and draft.config.draft_vocab_size == len(SOME)
    assert draft.target_ids is not None and draft.target_ids.tolist() == list(SOME)
    assert torch.equal(hidden, same)
    assert (columns - base[:, list(SOME)]).abs().max() < 1e-12
    found = inspect_checkpoint(part)
    assert (found["draft_vocab_size"], found["vocab_size"]) == (len(SOME), VOCAB)


def test_a_map_that_does_not_ascend_is_put_in_order(target: Any, tmp_path: Path) -> None:
    tensors = draft_tensors(own=True)
    config = speculators_config(draft_vocab_size=len(SOME))
    ordered = write_checkpoint(tmp_path / "ordered", config, reduced(tensors))
    mixed_up = write_checkpoint(tmp_path / "mixed", config, reduced(tensors, SOME[7:] + SOME[:7]))
    one, _, expected = block(ordered, target)
    other, _, base = block(mixed_up, target)
    assert torch.equal(base, expected)
    assert one.markov_head is not None and other.markov_head is not None
    assert torch.equal(one.markov_head.markov_w2.weight, other.markov_head.markov_w2.weight)
    assert torch.equal(one.markov_head.markov_w1.weight, other.markov_head.markov_w1.weight)


def test_a_permutation_of_the_whole_vocabulary(target: Any, tmp_path: Path) -> None:
    tensors = draft_tensors(own=True)
    whole = write_checkpoint(tmp_path / "whole", speculators_config(), tensors)
    turned = reduced(tensors, [*range(30, VOCAB), *range(30)])
    path = write_checkpoint(tmp_path / "turned", speculators_config(), turned)
    draft, _, base = block(path, target)
    assert draft.target_ids is None and torch.equal(base, block(whole, target)[2])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_other_packagings_honour_the_map_too(dtype: torch.dtype, target: Any, tmp_path: Path) -> None:
    plain: dict[str, Any] = {"kind": None, "confidence": None}
    cases = {
        "flat": (flat_config(draft_vocab_size=16), reduced(draft_tensors(own=True))),
        "nested": (nested_config({"draft_vocab_size": 16}), reduced(draft_tensors(own=False))),
        "unsaid": (nested_config(), reduced(draft_tensors(own=False))),
        "dflash": (dflash_config(draft_vocab_size=16), reduced(draft_tensors(own=False, **plain))),
        "zeros": (nested_config(), draft_tensors(own=False) | {"d2t": torch.zeros(VOCAB, dtype=torch.int64)}),
    }
    for name, (config, tensors) in cases.items():
        tensors["d2t"] = tensors["d2t"].to(dtype)
        draft, _, base = block(write_checkpoint(tmp_path / name, config, tensors), target)
        assert base.shape[1] == draft.config.draft_vocab_size == (VOCAB if name == "zeros" else 16)


@pytest.mark.parametrize(
    ("size", "offsets", "message"),
    [
        (16, None, r"draft_vocab_size is 16 of 61, but the map d2t .* is missing"),
        (15, torch.zeros(16, dtype=torch.int64), r"d2t has shape \[16\] .* expected \[15\]"),
        (16, torch.zeros(16), r"d2t .* dtype F32, expected \[16\] and one of I64, I32"),
        (16, torch.zeros(4, 4, dtype=torch.int64), r"d2t has shape \[4, 4\]"),
        (16, torch.full((16,), 46), "d2t maps the draft's token 15 to 61, outside"),
        (16, torch.full((16,), -1), "d2t maps the draft's token 0 to -1, outside"),
        (16, torch.full((16,), 2**63 - 1), "d2t maps the draft's token 0 to .* outside"),
        (16, torch.tensor([1, *[0] * 15]), "maps two of the draft's tokens to the same"),
    ],
)
def test_maps_that_are_refused(
    size: int, offsets: Tensor | None, message: str, target: Any, tmp_path: Path
) -> None:
    tensors = reduced(draft_tensors(own=True))
    del tensors["d2t"]
    if offsets is not None:
        tensors["d2t"] = offsets
    path = write_checkpoint(tmp_path, speculators_config(draft_vocab_size=size), tensors)
    with pytest.raises(CheckpointError, match=message):
        load_draft(path, target=target)
    with pytest.raises(CheckpointError, match=message):
        inspect_checkpoint(path)


def test_a_head_of_the_whole_vocabulary_does_not_fit_a_reduced_one(target: Any, tmp_path: Path) -> None:
    tensors = reduced(draft_tensors(own=True))
    tensors["lm_head.weight"] = torch.zeros(VOCAB, HIDDEN)
    path = write_checkpoint(tmp_path, speculators_config(draft_vocab_size=16), tensors)
    with pytest.raises(CheckpointError, match=r"lm_head.weight has the wrong shape, expected \[16, 32\]"):
        load_draft(path, target=target)


# The law of the text, with drafts that cannot propose tokens 0 and 3 of five.

LAW: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "rejection": ("vanilla", {}, {}),
    "block, penalties": (
        "gated",
        {"acceptance": "block"},
        {"repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.5},
    ),
    "candidates, biased": (
        "vanilla",
        {"markov_candidates": 2},
        {"temperature": 1.3, "logit_bias": {2: 1.5, 0: -2.0, 4: 0.7}},
    ),
    "block, cut, truncated": (
        "rnn",
        {"acceptance": "block", "policy": "threshold", "confidence_threshold": 0.4},
        {"temperature": 1.3, "top_k": 4, "top_p": 0.98},
    ),
    "coupled": ("rnn", {"acceptance": "coupled"}, {}),
}


@pytest.mark.parametrize("name", LAW)
def test_law_of_the_text(name: str, tmp_path: Path) -> None:
    head, options, sampling = LAW[name]
    path = write_target(tmp_path / "target", 5)
    nested = write_draft(tmp_path / "nested", 5, head=head)
    draft = as_speculators(nested, tmp_path / "draft", [1, 2, 4], 5, sample_from_anchor=head != "rnn")
    params = SamplingParams(max_tokens=LENGTH, n=1500, seed=len(name), **sampling)
    options = {"policy": "fixed", "max_batch_size": 256, **options}
    with DSparkDecoder.from_pretrained(path, draft, **options) as decoder:
        found: list[Counter[tuple[int, ...]]] = sampled(decoder, params)
    target = load_target(path)
    for prompt, counts in zip(PROMPTS, found, strict=True):
        assert any(0 in text for text in counts), "the target says tokens that the draft does not know"
        assert p_value(counts, law(target, list(prompt), params)) > ALPHA


# Equality with decoding alone, and that the engine walks the chain of the modules.


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """(draft, anchors, states, base logits, tokens verified, lengths) of every round of every runner."""
    rounds: list[tuple[Any, ...]] = []
    pending: list[tuple[Any, ...]] = []
    draft, verify = Runner.draft, Runner.verify

    def spy_draft(self: Runner, ids: list[int], anchors: list[int]) -> tuple[Tensor, Tensor | None]:
        base, hidden = draft(self, ids, anchors)
        states = None if hidden is None else hidden.clone()
        pending.append((self.draft_model, ids, anchors, states, base.clone()))
        return base, hidden

    def spy_verify(self: Runner, ids: list[int], tokens: list[int], lengths: list[int]) -> Tensor:
        if pending:
            rounds.append((*pending.pop(), ids, tokens, lengths))
        return verify(self, ids, tokens, lengths)

    monkeypatch.setattr(Runner, "draft", spy_draft)
    monkeypatch.setattr(Runner, "verify", spy_verify)
    yield rounds


def chain(draft: DSparkDraftModel, anchor: int, states: Tensor | None, base: Tensor) -> list[int]:
    """The greedy chain by the torch modules."""
    head, state, previous, tokens = draft.markov_head, None, torch.tensor(anchor), []
    lead = draft.config.state_rows - draft.config.gamma
    if head is not None and lead:
        assert states is not None
        _, state = head.step(previous, states[0], state)
    for slot, row in enumerate(base):
        if head is not None:
            hidden = None if states is None else states[lead + slot]
            bias, state = head.step(previous, hidden, state)
            row = row + bias
        best = int(row.argmax())
        token = best if draft.target_ids is None else int(draft.target_ids[best])
        tokens.append(token)
        previous = torch.tensor(token)
    return tokens


@pytest.mark.parametrize("from_anchor", [True, False], ids=["slot 0", "slot 0 dropped"])
@pytest.mark.parametrize("own_head", [True, False], ids=["own head", "the target's head"])
@pytest.mark.parametrize("head", HEADS)
def test_greedy_text_and_the_chain_of_the_modules(
    head: str | None, own_head: bool, from_anchor: bool, tmp_path: Path, drafted: list[tuple[Any, ...]]
) -> None:
    target, draft = pair(tmp_path, head, own_head, from_anchor)
    params = SamplingParams(max_tokens=30, temperature=0.0, repetition_penalty=1.0)
    prompts = [[3, 5], [1], [20, 21, 22, 4]]
    with DSparkDecoder.from_pretrained(target) as plain:
        expected = [r.token_ids for r in plain.generate(prompts, params)]
    with DSparkDecoder.from_pretrained(target, draft, policy="fixed") as decoder:
        assert [r.token_ids for r in decoder.generate(prompts, params)] == expected
        assert decoder.stats()["accepted"] > 0
    checked = 0
    for model, ids, anchors, states, base, verified, tokens, lengths in drafted:
        gamma, rows = model.config.gamma, model.config.state_rows
        assert gamma == (5 if from_anchor else 4)
        starts = dict(zip(verified, [sum(lengths[:i]) for i in range(len(lengths))], strict=True))
        for index, (request, anchor) in enumerate(zip(ids, anchors, strict=True)):
            part = None if states is None else states[index * rows : (index + 1) * rows]
            with torch.inference_mode():
                found = chain(model, anchor, part, base[index * gamma : (index + 1) * gamma])
            start, length = starts[request], lengths[verified.index(request)]
            assert tokens[start : start + length] == [anchor, *found][:length]
            checked += length - 1
    assert checked > 20


def pair(tmp_path: Path, head: str | None, own_head: bool, from_anchor: bool) -> tuple[Path, Path]:
    target = write_target(tmp_path / "target", WIDE)
    nested = write_draft(tmp_path / "nested", WIDE, head=head or "vanilla", block_size=5)
    lm_head = torch.randn(WIDE, 16, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    changes: dict[str, Any] = {"sample_from_anchor": from_anchor}
    own = lm_head * 0.4 if own_head else None
    draft = as_speculators(nested, tmp_path / "draft", TOKENS, WIDE, own, **changes)
    if head is None:
        forget_heads(draft)
    return target, draft


def forget_heads(path: Path) -> None:
    """Makes a plain block drafter of it."""
    import json

    from safetensors.torch import load_file, save_file

    config = json.loads((path / "config.json").read_text())
    config |= {"markov_rank": 0, "markov_head_type": None, "enable_confidence_head": False}
    (path / "config.json").write_text(json.dumps(config))
    tensors = load_file(path / "model.safetensors")
    kept = {name: t for name, t in tensors.items() if not name.startswith(("markov_head", "confidence_head"))}
    save_file(kept, path / "model.safetensors")


@pytest.mark.parametrize("candidates", [None, 3])
@pytest.mark.parametrize("head", HEADS)
def test_coupled_text_needs_no_draft(head: str | None, candidates: int | None, tmp_path: Path) -> None:
    target, draft = pair(tmp_path, head, own_head=False, from_anchor=head != "rnn")
    params = [
        SamplingParams(
            max_tokens=24, seed=seed, temperature=0.9, presence_penalty=0.4, logit_bias={7: 1.0, 3: 2.0}
        )
        for seed in range(6)
    ]
    prompts = [[s, 3, 5][: 1 + s % 3] for s in range(6)]
    with DSparkDecoder.from_pretrained(target, acceptance="coupled") as plain:
        expected = [r.token_ids for r in plain.generate(prompts, params)]
    with DSparkDecoder.from_pretrained(
        target, draft, policy="fixed", acceptance="coupled", markov_candidates=candidates
    ) as decoder:
        assert [r.token_ids for r in decoder.generate(prompts, params)] == expected
        assert decoder.stats()["accepted"] > 0
    said = {token for text in expected for token in text}
    assert said - set(TOKENS), "the target says tokens that the draft does not know"
