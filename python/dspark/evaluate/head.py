"""The confidence head's scores: on prompts that had no say in its calibration."""

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
    """The head's own, over all data sets."""
    calibrated: HeadScores | None
    """With the draft's calibration.json, of the same rounds."""
    note: str
    """Which prompts they are of, or why they are missing."""

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
    """The scores of the head in these rounds, which number `prompts`, rendered with `template`."""
    if not models.has_confidence:
        return Head(None, None, "this draft has no confidence head")
    if policy != "fixed":
        return Head(None, None, f'not scored: policy "{policy}" hides what the head thinks little of')
    entry = next((e for e in models.calibrations if e.key == (regime, models.gamma)), None)
    if entry is None:
        return Head(score(rounds), None, "no calibration.json with an entry for this")
    held_out = [p for p, prompt in enumerate(prompts) if digest(prompt) not in entry.fitted_prompts]
    if not held_out:
        note = "calibrated scores left out: calibration.json was fitted to each of these prompts"
        return Head(score(rounds), None, note)
    seen = rounds.select(np.isin(rounds.prompt, held_out))
    calibrated = score(seen, list(entry.temperatures[: rounds.gamma]))
    note = _note(entry, len(held_out), len(prompts))
    if entry.template_options != dict(template or {}):
        shown = json.dumps(entry.template_options)
        note += f"; it was fitted with the template options {shown}, so that the same texts are other prompts"
    return Head(score(seen), calibrated, note)


def _note(entry: Entry, held_out: int, prompts: int) -> str:
    if not entry.fitted_prompts:
        return (
            "calibration.json does not say which prompts it was fitted to: where these are among them, the "
            "calibrated scores flatter it"
        )
    note = f"scored on the {held_out} of {prompts} prompts that calibration.json was not fitted to"
    if entry.choosing_rounds is None and any(t != 1 for t in entry.temperatures):
        note += (
            ", but which of its temperatures stay was chosen by prompts that it does not name, maybe these"
        )
    return note
