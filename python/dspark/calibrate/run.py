"""Calibrates a pair: rollouts, a fit to half of the prompts, a choice by a quarter, scores on the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from dspark.calibrate.fit import FEWEST, fit_temperatures, reached_often, that_hold
from dspark.calibrate.rollout import Plan, require_confidence, roll_out, whole_blocks
from dspark.calibrate.rounds import JudgedRounds, judged_rounds, parts
from dspark.calibrate.scores import HeadScores, score
from dspark.checkpoint.calibration import Regime
from dspark.decoder import DSparkDecoder, Prompt
from dspark.errors import RequestError
from dspark.progress import Progress
from dspark.sampling import SamplingParams
from dspark.serve.models import Models
from dspark.serve.options import Options

FEWEST_TO_CHOOSE = 20
"""Rounds that have to reach a position before they say whether its temperature helps."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """The calibration of one regime, and how good it is on prompts that it did not use."""

    regime: Regime
    temperatures: list[float]
    acceptance: list[float]
    """How often each position was kept where the one before it was; of all rounds."""
    positions: int
    """How many positions, from the first on, were fitted; later ones were reached too rarely, and keep 1."""
    rounds: int
    """Rounds that it was fitted to."""
    choosing_rounds: int
    """Rounds of other prompts, which decided whether each temperature is kept."""
    prompts: tuple[int, ...]
    """The numbers of the prompts of both."""
    before: HeadScores
    """On the remaining prompts; empty where there were fewer than 4 in all, as is `after`."""
    after: HeadScores

    @property
    def name(self) -> str:
        """The regime in words."""
        return str(self.regime)

    @property
    def held_out_rounds(self) -> int:
        """Rounds that it is scored on."""
        return self.before.survival[0].count

    def to_json(self) -> dict[str, Any]:
        """Plain numbers."""
        return {
            **self.regime.to_json(),
            "temperatures": self.temperatures,
            "acceptance_by_position": self.acceptance,
            "fitted_positions": self.positions,
            "rounds": self.rounds,
            "choosing_rounds": self.choosing_rounds,
            "held_out_rounds": self.held_out_rounds,
            "before": self.before.to_json(),
            "after": self.after.to_json(),
        }


def regime_of(params: SamplingParams, options: Options) -> Regime:
    """The regime of parameters that are all filled in. Truncation means nothing at temperature 0."""
    greedy = params.temperature == 0
    return Regime(
        acceptance=options.acceptance,
        temperature=float(params.temperature or 0.0),
        top_k=0 if greedy else max(params.top_k or 0, 0),
        top_p=1.0 if greedy or params.top_p is None else float(params.top_p),
        min_p=0.0 if greedy else float(params.min_p or 0.0),
        markov_candidates=options.markov_candidates,
    )


def calibrate_pair(
    models: Models,
    prompts: Sequence[Prompt],
    regimes: Sequence[SamplingParams],
    plan: Plan,
    *,
    options: Options | None = None,
    progress: Progress = lambda *_: None,
) -> Iterator[Fitted]:
    """Fits the temperatures of a loaded pair for each of the sampling parameters, one after the other.

    Of `options`, the acceptance rule, `markov_candidates` and `max_model_len` matter; whole blocks are
    verified.

    Raises `ConfigError` for a pair without a confidence head, `DSparkError` for a draft that raises, and
    `RequestError` for too few rounds once the other regimes are done.
    """
    require_confidence(models)
    if len(prompts) < 2:
        raise RequestError(
            "at least 2 different prompts are needed, one to fit to and one to choose by (and 4 for scores); "
            f"found {len(prompts)}"
        )
    options = whole_blocks(options or Options(), models.gamma)
    done: set[Regime] = set()
    failed: RequestError | None = None
    with DSparkDecoder(lambda: models, options) as decoder:
        for given in regimes:
            params = given.with_defaults(models.generation_config)
            regime = regime_of(params, options)
            if regime in done:
                continue
            done.add(regime)
            results, which = roll_out(decoder, prompts, params, plan, partial(progress, str(regime)))
            try:
                fitted = fit_regime(regime, judged_rounds(results, which, models.gamma))
            except RequestError as error:
                failed = failed or error
            else:
                yield fitted
    if failed is not None:
        raise failed


def fit_regime(regime: Regime, rounds: JudgedRounds) -> Fitted:
    """Fits on every second prompt, chooses by every fourth and scores on the others: the prompts that chose
    the temperatures cannot judge them.

    Positions that too few rounds reach, to fit to or to choose by, keep the temperature 1, and so do those
    whose fitted temperature does not lower the error on the choosing prompts. Raises `RequestError` if even
    the first position is reached too rarely.
    """
    to_fit, to_choose, held_out = parts(rounds)
    positions = min(reached_often(to_fit, FEWEST), reached_often(to_choose, FEWEST_TO_CHOOSE))
    if positions == 0:
        fits, choices = (int(part.is_reached(0).sum()) for part in (to_fit, to_choose))
        more = "more prompts, --tokens or --samples" if regime.temperature else "more prompts or --tokens"
        raise RequestError(
            f"{regime}: {fits} rounds to fit to and {choices} to choose by are too few: {FEWEST} and "
            f"{FEWEST_TO_CHOOSE} are needed; give {more}"
        )
    temperatures = that_hold([round(t, 4) for t in fit_temperatures(to_fit, positions)], to_choose)
    temperatures += [1.0] * (rounds.gamma - positions)
    acceptance = [round(share, 4) for share in rounds.acceptance(positions)]
    prompts = tuple(np.union1d(to_fit.prompt, to_choose.prompt).tolist())
    return Fitted(
        regime,
        temperatures,
        acceptance,
        positions,
        rounds=len(to_fit),
        choosing_rounds=len(to_choose),
        prompts=prompts,
        before=score(held_out),
        after=score(held_out, temperatures),
    )
