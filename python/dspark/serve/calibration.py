"""Which calibration of the confidence head is in force.

A file beside the draft is used only by "throughput", the policy that needs the confidences' absolute size
(paper, section 3.2.1). "threshold" only needs their order, and its thresholds are set against the head's own
confidences: a new file must not move the cut. A calibration that the caller gives is used by every policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark import _core
from dspark.checkpoint.calibration import Entry, read_calibrations
from dspark.draft.config import DraftConfig
from dspark.errors import CheckpointError, ConfigError
from dspark.paths import expanded, is_file
from dspark.sampling import SamplingParams

if TYPE_CHECKING:
    from dspark.serve.models import Models
    from dspark.serve.options import Options


def draft_calibrations(path: Path, config: DraftConfig, block_size: int | None) -> tuple[Entry, ...]:
    """The entries of a draft's file, none without a file; raises `CheckpointError` for an entry that does not
    fit the draft. `block_size` is the requested one, which can be larger than the draft's own."""
    if not path.exists():
        return ()
    widest = config.training_block_size - (config.block_size - config.gamma)
    narrowest = 1 if block_size == config.gamma else config.gamma
    entries = read_calibrations(path)
    for number, entry in enumerate(entries):
        if not narrowest <= entry.block_size <= max(widest, config.gamma):
            raise CheckpointError(
                f"{path}: entries[{number}].block_size must be {config.gamma}, the tokens that this draft "
                f"drafts per block, found {entry.block_size}"
            )
    return tuple(entries)


@dataclass(frozen=True, slots=True)
class InForce:
    """The calibrations that the engine gets, and why."""

    calibrations: Sequence[tuple[tuple[float, int, float, float] | None, _core.Calibration]]
    """By (temperature, top_k, top_p, min_p); `None`: for every request. The first one of a temperature also
    serves truncations that have none of their own."""
    why: str | Mapping[str, Any]

    def info(self) -> str | dict[str, Any]:
        """For `DSparkDecoder.info()`."""
        return self.why if isinstance(self.why, str) else dict(self.why)


def in_force(options: Options, models: Models) -> InForce:
    """The calibration of a decoder; raises `CheckpointError` or `ConfigError` for one that does not fit."""
    given = options.calibration
    if isinstance(given, _core.Calibration):
        why = {"source": "the caller", "temperatures": given.temperatures}
        return InForce([(None, given)], why)
    if not models.has_confidence or models.draft is None or models.paths[1] is None:
        return InForce([], "none: no draft with a confidence head")
    if given is not None:
        path = expanded(given, "calibration")
        if not is_file(path):
            raise ConfigError(
                f"calibration must be a Calibration or a file, but there is no file {str(path)!r}"
            )
        entries = draft_calibrations(path, models.draft.config, options.block_size)
        chosen = choose(entries, options, models)
        if not chosen:
            raise ConfigError(
                f"{path} has no calibration for {_wanted(options, models)}: dspark calibrate makes one"
            )
        return _of_entries(str(path), chosen)
    if options.policy != "throughput":
        return InForce([], f'none: policy "{options.policy}" takes the head\'s own confidences')
    if not models.calibrations:
        return InForce([], "none: no calibration.json beside the draft; dspark calibrate makes one")
    chosen = choose(models.calibrations, options, models)
    if not chosen:
        return InForce([], f"none: calibration.json has none for {_wanted(options, models)}")
    return _of_entries("calibration.json", chosen)


def choose(entries: Sequence[Entry], options: Options, models: Models) -> list[Entry]:
    """The entries for this rule, number of Markov candidates and block size, by temperature.

    Of several for one temperature, the one with the truncation of the target's own defaults comes first, else
    the one without truncation, else the last in the file."""
    usual = SamplingParams().with_defaults(models.generation_config)

    def rank(entry: Entry) -> int:
        truncation = (entry.regime.top_k, entry.regime.top_p, entry.regime.min_p)
        if truncation == (max(usual.top_k or 0, 0), usual.top_p, usual.min_p):
            return 2
        return int(truncation == (0, 1.0, 0.0))

    here = (options.acceptance, options.markov_candidates, models.gamma)
    found = [
        entry
        for entry in reversed(entries)
        if (entry.regime.acceptance, entry.regime.markov_candidates, entry.block_size) == here
    ]
    return sorted(found, key=lambda entry: (entry.regime.temperature, -rank(entry)))


def _of_entries(source: str, entries: Sequence[Entry]) -> InForce:
    calibrations = [
        (
            (e.regime.temperature, e.regime.top_k, e.regime.top_p, e.regime.min_p),
            _core.Calibration(list(e.temperatures), e.block_size, list(e.acceptance_by_position)),
        )
        for e in entries
    ]
    return InForce(calibrations, {"source": source, "regimes": [str(e.regime) for e in entries]})


def _wanted(options: Options, models: Models) -> str:
    candidates = options.markov_candidates or "off"
    return f"acceptance {options.acceptance}, markov_candidates {candidates} and blocks of {models.gamma}"
