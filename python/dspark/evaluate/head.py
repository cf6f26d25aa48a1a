"""The confidence head's scores, on prompts that its calibration did not use."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dspark.calibrate.prompts import digest
from dspark.calibrate.rounds import JudgedRounds
from dspark.calibrate.scores import HeadScores, score
from dspark.checkpoint.calibration import Entry, Regime
from dspark.serve.models import Models


@dataclass(frozen=True, slots=True)
class Head:
    """The confidence head of a draft in one regime."""

    scores: HeadScores | None
    """Those of the head's own confidences, over all data sets."""
    calibrated: HeadScores | None
    """Those with the draft's calibration.json, on the same rounds."""
    note: str
    """Which prompts the scores are of, or why they are missing."""

    def to_json(self) -> dict[str, Any]:
        """Plain numbers."""
        return {
            "confidence_head": None if self.scores is None else self.scores.to_json(),
            "confidence_head_calibrated": None if self.calibrated is None else self.calibrated.to_json(),
            "confidence_head_note": self.note,
        }


def score_head(
    models: Models,
    regime: Regime,
    rounds: JudgedRounds,
    prompts: Sequence[Sequence[int]],
    policy: str,
    template: Mapping[str, Any] | None = None,
) -> Head:
    """Scores the head on these rounds, which refer to `prompts` (rendered with `template`) by number."""
    if not models.has_confidence:
        return Head(None, None, "this draft has no confidence head")
    if policy != "fixed":
        return Head(None, None, f'not scored: policy "{policy}" leaves out tokens of low confidence')
    entry = next((e for e in models.calibrations if e.key == (regime, models.gamma)), None)
    if entry is None:
        note = "no calibrated scores: calibration.json is missing or has no entry for this way of sampling"
        return Head(score(rounds), None, note)
    held_out = [p for p, prompt in enumerate(prompts) if digest(prompt) not in entry.fitted_prompts]
    if not held_out:
        note = "calibrated scores left out: calibration.json was fitted to each of these prompts"
        return Head(score(rounds), None, note)
    seen = rounds.select(np.isin(rounds.prompt, held_out))
    calibrated = score(seen, list(entry.temperatures[: rounds.gamma]))
    note = _note(entry, len(held_out), len(prompts))
    if entry.template_options != dict(template or {}):
        shown = json.dumps(entry.template_options)
        note += f"; it was fitted with template options {shown}, so the same texts are different prompts"
    return Head(score(seen), calibrated, note)


def _note(entry: Entry, held_out: int, prompts: int) -> str:
    if not entry.fitted_prompts:
        return (
            "calibration.json does not say which prompts it was fitted to: if these are among them, the "
            "calibrated scores are too good"
        )
    note = f"scored on the {held_out} of {prompts} prompts that calibration.json was not fitted to"
    if entry.choosing_rounds is None and any(t != 1 for t in entry.temperatures):
        note += ", but its temperatures were chosen by prompts that it does not name, which may be these"
    return note
