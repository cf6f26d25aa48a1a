"""The law of the text through `generate` itself: every sequence of three tokens over a vocabulary of five.

The expected probabilities come from plain full forwards of the target and a transcription of the sampling
transforms in numpy, so nothing is shared with the engine but the target's weights.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dspark import DSparkDecoder, SamplingParams
from dspark.target import load_target
from plain_law import ALPHA, LENGTH, PER_PROMPT, PROMPTS, VOCABULARY, law, p_value, sampled
from random_pair import write_draft, write_target


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("law")
    return write_target(root / "target", VOCABULARY), write_draft(root / "draft", VOCABULARY)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rejection": ({}, {}),
    "block": ({"acceptance": "block"}, {}),
    "coupled": ({"acceptance": "coupled"}, {}),
    "rejection, cut": ({"policy": "threshold", "confidence_threshold": 0.5}, {}),
    "block, cut": ({"acceptance": "block", "policy": "threshold", "confidence_threshold": 0.5}, {}),
    "candidates": ({"markov_candidates": 2}, {}),
    "penalties": ({}, {"repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.5}),
    "block, penalties, cut": (
        {"acceptance": "block", "policy": "threshold", "confidence_threshold": 0.5},
        {"repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.5},
    ),
    "truncated": ({}, {"temperature": 0.8, "top_k": 4, "top_p": 0.9, "min_p": 0.08}),
    "coupled, truncated": ({"acceptance": "coupled"}, {"temperature": 0.8, "top_k": 4, "top_p": 0.9}),
    "biased": ({}, {"temperature": 1.3, "logit_bias": {2: 1.5, 0: -2.0}}),
}


TOGETHER = ("rejection", "block, penalties, cut", "coupled, truncated", "truncated", "candidates", "biased")
"""What every run checks: each rule and each option is in one of them."""
QUICK = [(name, 1) for name in TOGETHER]
WHOLE = [pytest.param(name, 4, marks=[pytest.mark.long, pytest.mark.timeout(900)]) for name in CASES]


@pytest.mark.parametrize(("name", "runs"), QUICK + WHOLE)
def test_law_of_the_text(pair: tuple[Path, Path], name: str, runs: int) -> None:
    options, sampling = CASES[name]
    target = load_target(pair[0])
    pooled: list[Counter[tuple[int, ...]]] = [Counter() for _ in PROMPTS]
    with DSparkDecoder.from_pretrained(
        *pair, **{"policy": "fixed", "max_batch_size": 256, **options}
    ) as decoder:
        for run in range(runs):
            params = SamplingParams(max_tokens=LENGTH, n=PER_PROMPT, seed=1000 * run + len(name), **sampling)
            for total, counts in zip(pooled, sampled(decoder, params), strict=True):
                total.update(counts)
    for prompt, counts in zip(PROMPTS, pooled, strict=True):
        assert p_value(counts, law(target, list(prompt), params)) > ALPHA


def test_a_small_bias_would_be_seen(pair: tuple[Path, Path]) -> None:
    """The same test refuses texts drawn at a temperature 15 % too high."""
    target = load_target(pair[0])
    biased = SamplingParams(max_tokens=LENGTH, n=PER_PROMPT, seed=5, temperature=1.15)
    with DSparkDecoder.from_pretrained(*pair, policy="fixed", max_batch_size=256) as decoder:
        expected = SamplingParams(max_tokens=LENGTH)
        values = [
            p_value(counts, law(target, list(prompt), expected))
            for prompt, counts in zip(PROMPTS, sampled(decoder, biased), strict=True)
        ]
    assert min(values) < ALPHA
