"""How far probabilities are from what happened: calibration error, ranking, squared error."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Outcomes = NDArray[np.bool_]

BINS = 15
"""Bins of the calibration error, as in Guo et al. (arXiv 1706.04599)."""


@dataclass(frozen=True, slots=True)
class Bin:
    """One bin of a reliability diagram."""

    count: int
    predicted: float
    """Mean of the probabilities in it."""
    happened: float
    """Share of the outcomes in it that are true."""

    def to_json(self) -> dict[str, float]:
        """Plain numbers."""
        return {"count": self.count, "predicted": self.predicted, "happened": self.happened}


def reliability(predicted: Numbers, happened: Outcomes, bins: int = BINS) -> list[Bin]:
    """At most `bins` bins of sizes as equal as possible, by ascending probability.

    Equal sizes, not equal widths: confidences crowd at the ends, and bins that follow the order stay the same
    under a temperature, so that the error below is a smooth function of it. Equal probabilities are never
    split between bins, or the error would depend on the order in which they were given.
    """
    if len(predicted) == 0:
        return []
    order = np.argsort(predicted, kind="stable")
    ordered, outcomes = predicted[order], happened[order]
    edges = np.linspace(0, len(ordered), min(bins, len(ordered)) + 1).round().astype(np.int64)
    # Each edge moves to the start of its run of equal probabilities.
    starts = np.unique(np.searchsorted(ordered, ordered[edges[:-1]], side="left"))
    return [
        Bin(len(part), float(part.mean()), float(hits.mean()))
        for part, hits in zip(np.split(ordered, starts[1:]), np.split(outcomes, starts[1:]), strict=True)
    ]


def calibration_error(predicted: Numbers, happened: Outcomes, bins: int = BINS) -> float | None:
    """Expected calibration error: the mean gap between probability and frequency over the bins, weighted by
    their sizes (Naeini et al., 2015). `None` without data."""
    if len(predicted) == 0:
        return None
    found = reliability(predicted, happened, bins)
    return sum(b.count * abs(b.predicted - b.happened) for b in found) / len(predicted)


def auroc(predicted: Numbers, happened: Outcomes) -> float | None:
    """Probability that a true outcome had the higher prediction than a false one, ties counting half (Hanley
    and McNeil, 1982). `None` where all outcomes are the same."""
    positive = int(happened.sum())
    negative = len(happened) - positive
    if positive == 0 or negative == 0:
        return None
    _, where, counts = np.unique(predicted, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2  # the mean rank of each run of ties, from 1
    total = float(ranks[where][happened].sum())
    return (total - positive * (positive + 1) / 2) / (positive * negative)


def brier(predicted: Numbers, happened: Outcomes) -> float | None:
    """Mean squared distance of probability and outcome (Brier, 1950). `None` without data."""
    return float(np.mean((predicted - happened) ** 2)) if len(predicted) else None
