"""Text from a hybrid target: the same whatever the draft, the batch and the schedule, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dspark import DSparkDecoder, SamplingParams
from dspark.audit.run import audit_pair
from dspark.calibrate.rollout import Plan
from dspark.serve.models import Models
from dspark.serve.options import Options
from hybrid_zoo import write_hybrid
from model_zoo import draft_tensors, nested_config, write_checkpoint
from places import DATA

TARGET, DRAFT = DATA / "hybrid" / "target", DATA / "hybrid" / "draft-nested"
PROMPTS: list[Any] = ["def read(self, size):\n", "x", "import os\n\nclass Reader:\n    def", [5] * 70]
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 1.0, "repetition_penalty": 1.2, "presence_penalty": 0.5},
]

Decoders = Callable[..., DSparkDecoder]


@pytest.fixture(scope="module")
def hybrids() -> Iterator[Decoders]:
    """Makes decoders of the fixture's target, each kind once."""
    made: dict[str, DSparkDecoder] = {}

    def make(draft: Path | None = DRAFT, **options: Any) -> DSparkDecoder:
        key = repr((draft, sorted(options.items())))
        if key not in made:
            options = {"policy": "fixed", **options}
            made[key] = DSparkDecoder.from_pretrained(TARGET, draft, device="cpu", dtype="float64", **options)
        return made[key]

    yield make
    for decoder in made.values():
        decoder.close()


def texts(decoder: DSparkDecoder, params: list[SamplingParams]) -> list[tuple[int, ...]]:
    results = decoder.generate([PROMPTS[i % len(PROMPTS)] for i in range(len(params))], params)
    assert all(r.error is None for r in results)
    return [r.token_ids for r in results]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_coupled_text_needs_no_draft(hybrids: Decoders, sampling: dict[str, Any]) -> None:
    """For many seeds: with a draft, with a cut, with a narrower block, in a batch and alone."""
    params = [SamplingParams(max_tokens=24 + seed % 9, seed=seed, **sampling) for seed in range(24)]
    expected = texts(hybrids(None, acceptance="coupled"), params)
    for variant in ({}, {"policy": "threshold", "confidence_threshold": 0.5}, {"block_size": 4}):
        decoder = hybrids(acceptance="coupled", **variant)
        assert texts(decoder, params) == expected
        assert decoder.stats()["accepted"] > 0
    for i in range(0, 24, 5):
        alone = hybrids(acceptance="coupled").generate(PROMPTS[i % len(PROMPTS)], params[i])
        assert alone.token_ids == expected[i]


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_greedy_text_needs_no_draft(hybrids: Decoders, acceptance: str) -> None:
    params = [SamplingParams(max_tokens=60, temperature=0.0) for _ in PROMPTS]
    expected = texts(hybrids(None, acceptance=acceptance), params)
    for variant in ({}, {"policy": "threshold", "confidence_threshold": 0.7}):
        decoder = hybrids(acceptance=acceptance, **variant)
        assert texts(decoder, params) == expected
        assert decoder.stats()["accepted"] > 0


def test_neighbours_do_not_change_a_sampled_text(hybrids: Decoders) -> None:
    params = [
        SamplingParams(max_tokens=10 + 11 * (seed % 3), temperature=1.0, seed=seed) for seed in range(12)
    ]
    together = texts(hybrids(), params)
    for i, text in enumerate(together):
        assert hybrids().generate(PROMPTS[i % len(PROMPTS)], params[i]).token_ids == text


@pytest.mark.parametrize("rows", [1, 3, 512])
def test_a_prompt_in_chunks_gives_the_same_drafts(hybrids: Decoders, rows: int) -> None:
    params = SamplingParams(max_tokens=40, temperature=0.0)
    prompts = [*PROMPTS, [17]]
    expected = hybrids().generate(prompts, params)
    chunked = hybrids(prefill_chunk_size=rows)
    for got, whole in zip(chunked.generate(prompts, params), expected, strict=True):
        assert got.token_ids == whole.token_ids
        assert [(r.drafted, r.accepted) for r in got.rounds] == [
            (r.drafted, r.accepted) for r in whole.rounds
        ]
        for mine, theirs in zip(got.rounds, whole.rounds, strict=True):
            assert mine.confidence == pytest.approx(theirs.confidence, abs=1e-6)


def test_the_window_is_never_overrun(hybrids: Decoders) -> None:
    window = hybrids().info()["max_model_len"]
    for length in (window - 8, window - 1, window):
        result = hybrids().generate([3] * length, SamplingParams(temperature=0.0, ignore_eos=True))
        assert len(result.token_ids) == window - length and result.finish_reason == "length"


@pytest.mark.parametrize("acceptance", ["rejection", "coupled"])
def test_two_random_drafts_give_the_same_text(tmp_path: Path, acceptance: str) -> None:
    """Random weights agree rarely, so that nearly every round rolls back; seven tokens, so that some do."""
    target = write_hybrid(tmp_path / "target", seed=3, vocab_size=7)
    temperature = 1.0 if acceptance == "coupled" else 0.0
    params = [SamplingParams(max_tokens=40, temperature=temperature, seed=s) for s in range(6)]
    prompts = [[s, 3, 5][: 1 + s % 3] for s in range(6)]
    with DSparkDecoder.from_pretrained(target, acceptance=acceptance) as plain:
        expected = [r.token_ids for r in plain.generate(prompts, params)]
    kept = set()
    for seed, head in ((1, "vanilla"), (2, "rnn")):
        tensors = draft_tensors(own=False, kind=head, seed=seed)
        for name in ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"):
            tensors[name] = tensors[name][:7]
        config = nested_config({"markov_head_type": head}, vocab_size=7, max_position_embeddings=512)
        draft = write_checkpoint(tmp_path / head, config, tensors)
        with DSparkDecoder.from_pretrained(target, draft, policy="fixed", acceptance=acceptance) as decoder:
            results = decoder.generate(prompts, params)
        assert [r.token_ids for r in results] == expected
        kept |= {r.accepted for result in results for r in result.rounds if r.drafted == 5}
    assert {0, 1, 2} <= kept


def test_an_audit_of_the_pair_passes() -> None:
    models = Models.load(TARGET, DRAFT, dtype="float32", device="cpu")
    report = audit_pair(
        models,
        Options(policy="fixed"),
        ["def read(self", "class A:\n", "import "],
        Plan(tokens=32, samples=8),
    )
    assert report.verdict == "pass"


def test_an_audit_shows_states_that_are_not_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: keys and values alone go back, as with a cache that is merely cropped."""
    from dspark.target.hybrid.cache import HybridCache

    advance = HybridCache.advance

    def crop(self: HybridCache, count: int) -> None:
        rows = 0 if self._pending is None else self._pending[2]
        advance(self, rows)
        self.kv.length -= rows - count

    monkeypatch.setattr(HybridCache, "advance", crop)
    models = Models.load(TARGET, DRAFT, dtype="float32", device="cpu")
    report = audit_pair(
        models, Options(policy="fixed"), ["def read(self", "class A:\n"], Plan(tokens=32, samples=8)
    )
    assert report.verdict == "fail"
