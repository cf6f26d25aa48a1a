"""Ratios of speeds that were measured in turns, with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 4000
LEVEL = 0.95

FEWEST = 3
"""With fewer turns, resampling says nothing: the interval of one turn would have no width."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times as fast as the better of others, with an interval if there were enough turns."""

    median: float
    low: float | None
    high: float | None
    over: str
    """Which of the others was better."""


def ratio_over_best(
    mine: Sequence[float], others: Mapping[str, Sequence[float]], *, resamples: int = RESAMPLES, seed: int = 0
) -> Ratio:
    """The speed of a mode over that of the better of others.

    Entry t is the speed in turn t. In a turn all modes have the same prompts and the same other load on the
    machine, so a ratio is taken in each turn; the result is the smallest, over the others, of the median over
    turns. The interval is the percentile bootstrap: whole turns are drawn with replacement, and the better
    one is found anew in every resample. Medians of a few turns are coarse: with lognormal noise the interval
    covers the truth in 94 to 95 of 100 cases with 5 or 9 turns, in 92 with 15, but in 87 with 7 and in 72
    with 3. Below `FEWEST` turns there is none.
    """
    if not others or any(len(speeds) != len(mine) for speeds in others.values()) or not mine:
        raise ValueError("every mode needs one speed for each turn")
    names = list(others)
    ratios = np.array([np.asarray(mine, float) / np.asarray(others[name], float) for name in names])
    medians = np.median(ratios, axis=1)
    best = int(medians.argmin())
    if len(mine) < FEWEST:
        return Ratio(float(medians[best]), None, None, names[best])
    turns = np.random.default_rng(seed).integers(len(mine), size=(resamples, len(mine)))
    drawn = np.median(ratios[:, turns], axis=2).min(axis=0)
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Ratio(float(medians[best]), float(low), float(high), names[best])
