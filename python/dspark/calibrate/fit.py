"""Sequential temperature scaling: a temperature for each position, from left to right (paper, section 3.2.1).

The paper searches a grid for the temperature with the least expected calibration error of the cumulative
product. That error is noisy, and its minimum can be anywhere in a flat valley: on confidences that are right
already, the plain minimum over 1,000 rounds is off by a factor of two at the seventh position. So the search
returns the middle of the valley, which is everything within one standard error of the minimum, or 1 if that
is in the valley.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dspark.calibrate.metrics import Numbers, Outcomes, calibration_error
from dspark.calibrate.rounds import JudgedRounds

GRID = np.exp(np.linspace(-np.log(8.0), np.log(8.0), 81))
"""Temperatures that are tried; the middle one is 1."""

FEWEST = 30
"""Rounds that have to reach a position before a temperature is fitted to it."""

_LEAST = 2.0**-25
"""Confidences are float32: closer to 0 or 1 than this they round to 0 or 1, and their logit is unknown."""


def logits(confidences: Numbers) -> Numbers:
    """ln(c / (1 - c)), finite for every c in [0, 1]."""
    inside = np.clip(confidences, _LEAST, 1.0 - _LEAST)
    return np.log(inside) - np.log1p(-inside)


def sigmoid(logit: Numbers) -> Numbers:
    """1 / (1 + exp(-logit))."""
    return 1.0 / (1.0 + np.exp(-logit))


def calibrated(confidences: Numbers, temperatures: Numbers) -> Numbers:
    """sigma(logit(c) / T), position by position; the last axis has one entry for each temperature."""
    return sigmoid(logits(confidences) / temperatures)


def reached_often(rounds: JudgedRounds, fewest: int = FEWEST) -> int:
    """How many positions, counted from the first, were reached by at least `fewest` rounds."""
    counts = [int(rounds.is_reached(k).sum()) for k in range(rounds.gamma)]
    return next((k for k, count in enumerate(counts) if count < fewest), rounds.gamma)


def fit_temperatures(rounds: JudgedRounds, positions: int) -> list[float]:
    """One temperature for each of the first positions of the block, which `reached_often` counts."""
    survival = np.ones(len(rounds))
    temperatures: list[float] = []
    for k in range(positions):
        logit = logits(rounds.confidences[:, k])
        rows = rounds.is_judged(k)
        temperatures.append(_search(logit[rows], survival[rows], rounds.survived(k)[rows]))
        survival = survival * sigmoid(logit / temperatures[-1])
    return temperatures


def that_hold(temperatures: Sequence[float], rounds: JudgedRounds) -> list[float]:
    """The temperatures, with 1 in place of those that do not lower the error on these rounds, which they were
    not fitted to."""
    survival = np.ones(len(rounds))
    found: list[float] = []
    for k, temperature in enumerate(temperatures):
        logit, rows = logits(rounds.confidences[:, k]), rounds.is_judged(k)
        reached = {t: survival * sigmoid(logit / t) for t in (temperature, 1.0)}
        happened = rounds.survived(k)[rows]
        errors = {t: calibration_error(one[rows], happened) or 0.0 for t, one in reached.items()}
        found.append(temperature if errors[temperature] < errors[1.0] else 1.0)
        survival = reached[found[-1]]
    return found


def _search(logit: Numbers, survival: Numbers, happened: Outcomes) -> float:
    """The temperature of one position: `survival` is the calibrated product before it, `happened` says
    whether the prefix that includes it was accepted."""
    errors = np.array([calibration_error(survival * sigmoid(logit / t), happened) for t in GRID])
    share = float(happened.mean())
    noise = (share * (1.0 - share) / len(happened)) ** 0.5
    low = high = best = int(errors.argmin())
    within = errors <= errors[best] + noise
    while low > 0 and within[low - 1]:
        low -= 1
    while high < len(GRID) - 1 and within[high + 1]:
        high += 1
    one = len(GRID) // 2
    return 1.0 if low <= one <= high else float(np.exp(np.log(GRID[low : high + 1]).mean()))
