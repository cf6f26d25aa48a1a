"""The law of the text through `generate` itself: every sequence of three tokens over a vocabulary of five.

The expected probabilities come from plain full forwards of the target and a transcription of the sampling
transforms in numpy, so nothing is shared with the engine but the target's weights.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch

from dspark import DSparkDecoder, SamplingParams
from dspark.target import TargetModel, load_target
from random_pair import write_draft, write_target

VOCABULARY, LENGTH, PER_PROMPT = 5, 3, 4000
PROMPTS = ([1], [2, 3, 4, 1, 0, 2], [4, 4, 2])
ALPHA = 1e-9


def transformed(
    logits: np.ndarray, prompt: list[int], output: list[int], params: SamplingParams
) -> np.ndarray:
    """One row's probabilities under `params`, written for clarity."""
    row = logits.astype(np.float64).copy()
    for token, bias in (params.logit_bias or {}).items():
        row[token] += bias
    if params.repetition_penalty is not None:
        for token in set(prompt) | set(output):
            row[token] *= params.repetition_penalty if row[token] < 0 else 1 / params.repetition_penalty
    for token, count in Counter(output).items():
        row[token] -= params.frequency_penalty * count + params.presence_penalty
    row /= 1.0 if params.temperature is None else params.temperature
    if params.top_k:
        row[row < np.sort(row)[-params.top_k]] = -np.inf
    if params.top_p is not None:
        order = np.argsort(-row, kind="stable")
        mass = np.cumsum(softmax(row)[order])
        row[order[1:][mass[:-1] >= params.top_p]] = -np.inf
    if params.min_p is not None:
        p = softmax(row)
        row[p < params.min_p * p.max()] = -np.inf
    return softmax(row)


def softmax(row: np.ndarray) -> np.ndarray:
    weights = np.exp(row - row.max())
    return weights / weights.sum()


def law(target: TargetModel, prompt: list[int], params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Probability of every text of LENGTH tokens."""
    probabilities = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[tuple[int, ...], float] = {}
        for text, mass in probabilities.items():
            ids = torch.tensor(prompt + list(text))
            with torch.inference_mode():
                logits, _ = target(ids, [(target.new_cache(), len(ids))])
            row = transformed(logits[-1].numpy(), prompt, list(text), params)
            longer |= {(*text, token): mass * row[token] for token in range(VOCABULARY)}
        probabilities = longer
    return probabilities


def p_value(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Chi-square; texts of small expectation are pooled, one of probability 0 is impossible."""
    total = sum(counts.values())
    assert all(expected[text] > 0 for text in counts), "a text that the target never says"
    small = [text for text, p in expected.items() if 0 < p * total < 8]
    cells = [(counts[text], p * total) for text, p in expected.items() if p * total >= 8]
    if small:
        cells.append((sum(counts[text] for text in small), sum(expected[text] for text in small) * total))
    observed, wanted = np.array(cells).T
    keep = wanted > 0
    return float(
        scipy.stats.chisquare(observed[keep], wanted[keep] * observed[keep].sum() / wanted[keep].sum()).pvalue
    )


def sampled(decoder: DSparkDecoder, params: SamplingParams) -> list[Counter[tuple[int, ...]]]:
    """Texts of all prompts, generated together as one ragged batch."""
    results: Any = decoder.generate([list(prompt) for prompt in PROMPTS], params)
    for samples in results:
        assert all(result.finish_reason == "length" for result in samples)
    rounds = [r for samples in results for result in samples for r in result.rounds]
    assert sum(r.accepted for r in rounds) > 0.1 * sum(r.drafted for r in rounds), (
        "nothing accepted proves nothing"
    )
    return [Counter(result.token_ids for result in samples) for samples in results]


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


@pytest.mark.parametrize("runs", [1, pytest.param(4, marks=[pytest.mark.long, pytest.mark.timeout(900)])])
@pytest.mark.parametrize("name", CASES)
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
