"""Tests of uniform and independent numbers, and what they would have found."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

CAUGHT = 0.99
"""Probability of being caught that the statements of power promise."""


def ks_distance(numbers: Numbers) -> float:
    """Largest distance between the empirical distribution function and that of the uniform distribution
    (Kolmogorov-Smirnov)."""
    ordered = np.sort(numbers)
    steps = np.arange(len(ordered) + 1) / len(ordered)
    return float(max((steps[1:] - ordered).max(), (ordered - steps[:-1]).max()))


def ks_p_value(distance: float, count: int) -> float:
    """Probability of so large a distance by chance, at most: 2 exp(-2 n d^2), valid for every n.

    Dvoretzky-Kiefer-Wolfowitz with Massart's constant; also the first term of Kolmogorov's series, so
    nothing is lost in the tail, where it matters.
    """
    return min(1.0, 2 * math.exp(-2 * count * distance**2))


def ks_limit(count: int, level: float) -> float:
    """The distance at which `ks_p_value` falls to `level`."""
    return math.sqrt(math.log(2 / level) / (2 * count))


def ks_detectable(count: int, level: float) -> float:
    """Shift of the distribution function that is caught with probability 0.99 at least, wherever it is.

    If the true function is that far from uniform at one point, the empirical one is within `ks_limit(count,
    0.01)` of the true one with probability 0.99, so the distance stays above `ks_limit(count, level)`.
    """
    return ks_limit(count, level) + ks_limit(count, 1 - CAUGHT)


def lag_correlation(pairs: Numbers) -> float:
    """Correlation of neighbouring uniform numbers `[m, 2]`, with the known mean 1/2 and variance 1/12."""
    return float(12 * ((pairs[:, 0] - 0.5) * (pairs[:, 1] - 0.5)).mean())


def lag_p_value(correlation: float, count: int) -> float:
    """Two-sided normal p-value of a correlation over `count` pairs: its standard error is 1/sqrt(count)."""
    return math.erfc(abs(correlation) * math.sqrt(count / 2))


def lag_detectable(count: int, level: float) -> float:
    """Correlation that is caught with probability 0.99."""
    normal = NormalDist()
    return (normal.inv_cdf(1 - level / 2) + normal.inv_cdf(CAUGHT)) / math.sqrt(count)


SIMULATED = 100
"""Audits that are simulated to say how strong one is."""


def smallest_caught_share(
    planted: Numbers, is_caught: Callable[[Numbers], bool], generator: np.random.Generator
) -> float | None:
    """The smallest share of tokens that could have been drawn wrongly and be caught in all of
    `SIMULATED` audits.

    `planted[t]` is the transform of token t under the wrong distribution; in a simulated audit each token has
    it with the probability in question, else a uniform number. Found by bisection to 1/128; `None`: not even
    the share 1 is caught.
    """

    def always(share: float) -> bool:
        for _ in range(SIMULATED):
            uniform = generator.random(len(planted))
            if not is_caught(np.where(generator.random(len(planted)) < share, planted, uniform)):
                return False
        return True

    if not always(1.0):
        return None
    low, high = 0.0, 1.0
    while high - low > 1 / 128:
        middle = (low + high) / 2
        low, high = (low, middle) if always(middle) else (middle, high)
    return high
