"""How good confidences are, in numbers: before and after calibration, by position and overall."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dspark.calibrate.fit import calibrated
from dspark.calibrate.metrics import Bin, Numbers, Outcomes, auroc, brier, calibration_error, reliability
from dspark.calibrate.rounds import JudgedRounds


@dataclass(frozen=True, slots=True)
class Scores:
    """Probabilities against what happened."""

    count: int
    happened: float | None
    """Share of true outcomes."""
    ece: float | None
    auroc: float | None
    brier: float | None
    bins: tuple[Bin, ...]

    @classmethod
    def of(cls, predicted: Numbers, happened: Outcomes) -> Scores:
        """Computes all scores."""
        return cls(
            len(predicted),
            float(happened.mean()) if len(happened) else None,
            calibration_error(predicted, happened),
            auroc(predicted, happened),
            brier(predicted, happened),
            tuple(reliability(predicted, happened)),
        )

    def to_json(self) -> dict[str, Any]:
        """Plain numbers."""
        return {
            "count": self.count,
            "happened": self.happened,
            "ece": self.ece,
            "auroc": self.auroc,
            "brier": self.brier,
            "bins": [b.to_json() for b in self.bins],
        }


@dataclass(frozen=True, slots=True)
class HeadScores:
    """The scores of a confidence head, with or without a calibration."""

    survival: tuple[Scores, ...]
    """For each position: the product of the confidences up to it, against the whole prefix being accepted.
    Plans are made by it, and the calibration is fitted to it."""
    confidence: tuple[Scores, ...]
    """For each position: its own confidence, against its token being accepted after an accepted prefix."""
    overall: Scores
    """The survivals of all positions together."""

    def to_json(self) -> dict[str, Any]:
        """Plain numbers."""
        return {
            "overall": self.overall.to_json(),
            "survival": [s.to_json() for s in self.survival],
            "confidence": [s.to_json() for s in self.confidence],
        }


def score(rounds: JudgedRounds, temperatures: list[float] | None = None) -> HeadScores:
    """The scores of these rounds' confidences, calibrated with `temperatures` if given."""
    confidences = rounds.confidences
    if temperatures is not None:
        confidences = calibrated(confidences, np.asarray(temperatures))
    products = np.cumprod(confidences, axis=1)
    positions = range(rounds.gamma)
    joint = [(products[rounds.is_judged(k), k], rounds.survived(k)[rounds.is_judged(k)]) for k in positions]
    own = [
        (confidences[rounds.is_reached(k), k], rounds.survived(k)[rounds.is_reached(k)]) for k in positions
    ]
    return HeadScores(
        tuple(Scores.of(*pair) for pair in joint),
        tuple(Scores.of(*pair) for pair in own),
        Scores.of(np.concatenate([p for p, _ in joint]), np.concatenate([h for _, h in joint])),
    )
