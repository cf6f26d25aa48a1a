"""The law of every short text, from plain full forwards of the target and a transcription of the sampling
transforms in numpy: nothing is shared with the engine but the target's weights."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import scipy.stats
import torch

from dspark import DSparkDecoder, SamplingParams
from dspark.target import TargetModel

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
