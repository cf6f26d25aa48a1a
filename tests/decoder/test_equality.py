"""The same text whatever the draft, the batch and the schedule, in float64 where it is exact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dspark import DSparkDecoder, SamplingParams
from places import RNN_DRAFT
from random_pair import write_draft, write_target

Decoders = Callable[..., DSparkDecoder]
PROMPTS: list[Any] = [
    "def read(self, size):\n",
    "x",
    "import os\n\nclass Reader:\n    def __init__(self",
    [5] * 40,
]
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 1.3, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 1.0, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.2},
]


def texts(decoder: DSparkDecoder, params: list[SamplingParams]) -> list[tuple[int, ...]]:
    results = decoder.generate([PROMPTS[i % len(PROMPTS)] for i in range(len(params))], params)
    assert all(r.error is None for r in results)
    return [r.token_ids for r in results]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_coupled_text_needs_no_draft(decoders: Decoders, sampling: dict[str, Any]) -> None:
    """For many seeds: with either draft, with a cut, with few candidates, in a batch and alone."""
    options = {"acceptance": "coupled", "dtype": "float64"}
    params = [SamplingParams(max_tokens=24 + seed % 9, seed=seed, **sampling) for seed in range(24)]
    expected = texts(decoders(draft=None, **options), params)
    variants: list[dict[str, Any]] = [
        {},
        {"draft": RNN_DRAFT},
        {"policy": "threshold", "confidence_threshold": 0.5},
        {"markov_candidates": 8, "block_size": 5},
    ]
    for variant in variants:
        decoder = decoders(**options, **variant)
        assert texts(decoder, params) == expected
        assert decoder.stats()["accepted"] > 0
    for i in range(0, 24, 5):
        alone = decoders(**options).generate(PROMPTS[i % len(PROMPTS)], params[i])
        assert alone.token_ids == expected[i]


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_greedy_text_needs_no_draft(decoders: Decoders, acceptance: str) -> None:
    options = {"acceptance": acceptance, "dtype": "float64"}
    params = [SamplingParams(max_tokens=60, temperature=0.0) for _ in PROMPTS]
    expected = texts(decoders(draft=None, **options), params)
    for variant in ({}, {"draft": RNN_DRAFT}, {"policy": "threshold", "confidence_threshold": 0.7}):
        decoder = decoders(**options, **variant)
        assert texts(decoder, params) == expected
        assert decoder.stats()["accepted"] > 0


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_neighbours_do_not_change_a_sampled_text(decoders: Decoders, acceptance: str) -> None:
    decoder = decoders(acceptance=acceptance, dtype="float64")
    params = [
        SamplingParams(max_tokens=10 + 11 * (seed % 3), temperature=1.0, seed=seed) for seed in range(12)
    ]
    together = texts(decoder, params)
    for i, text in enumerate(together):
        assert decoder.generate(PROMPTS[i % len(PROMPTS)], params[i]).token_ids == text


@pytest.mark.parametrize("head", ["none", "vanilla", "gated", "rnn"])
@pytest.mark.parametrize("acceptance", ["rejection", "block", "coupled"])
def test_random_pairs_with_every_head(tmp_path: Path, head: str, acceptance: str) -> None:
    target = write_target(tmp_path / "target", 7)
    draft = write_draft(tmp_path / "draft", 7, head=head, block_size=5)
    temperature = 1.0 if acceptance == "coupled" else 0.0
    params = [SamplingParams(max_tokens=40, temperature=temperature, seed=s) for s in range(6)]
    prompts = [[s, 3, 5][: 1 + s % 3] for s in range(6)]
    with DSparkDecoder.from_pretrained(target, acceptance=acceptance) as plain:
        expected = [r.token_ids for r in plain.generate(prompts, params)]
    with DSparkDecoder.from_pretrained(target, draft, policy="fixed", acceptance=acceptance) as decoder:
        results = decoder.generate(prompts, params)
        assert [r.token_ids for r in results] == expected
        assert decoder.stats()["accepted"] > 0
        assert max(r.drafted for result in results for r in result.rounds) == 5


def test_a_request_may_decline_the_draft_beside_others_that_do_not(decoders: Decoders) -> None:
    decoder = decoders(dtype="float64")
    params = [SamplingParams(max_tokens=30, temperature=0.0, speculative=i % 2 == 0) for i in range(4)]
    results = decoder.generate(PROMPTS[:1] * 4, params)
    assert len({r.token_ids for r in results}) == 1
    assert [r.speculation for r in results] == ["on", "off: speculative=False"] * 2
    assert [r.acceptance_length is None for r in results] == [False, True] * 2
    assert all(r.drafted == 0 for r in results[1].rounds)
