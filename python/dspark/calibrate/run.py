"""Calibrates a pair: rollouts, the fit on half of the prompts, the scores on the other half."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from dspark.calibrate.fit import FEWEST, fit_temperatures, reached_often, that_hold
from dspark.calibrate.rollout import Plan, Progress, require_confidence, roll_out, whole_blocks
from dspark.calibrate.rounds import JudgedRounds, halves, judged_rounds
from dspark.calibrate.scores import HeadScores, score
from dspark.checkpoint.calibration import Regime
from dspark.decoder import DSparkDecoder, Prompt
from dspark.errors import RequestError
from dspark.sampling import SamplingParams
from dspark.serve.models import Models
from dspark.serve.options import Options

FEWEST_HELD_OUT = 20
"""Rounds that have to reach a position before its scores say anything."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """The calibration of one regime, and how good it is on prompts that it was not fitted to."""

    regime: Regime
    temperatures: list[float]
    acceptance: list[float]
    """How often each position was kept where the one before it was; of all rounds."""
    positions: int
    """The first so many were fitted; those behind them were reached too rarely, and keep 1."""
    rounds: int
    """Rounds that it was fitted to."""
    prompts: tuple[int, ...]
    """The numbers of their prompts."""
    before: HeadScores
    after: HeadScores

    @property
    def name(self) -> str:
        """The regime in words."""
        return str(self.regime)

    def to_json(self) -> dict[str, Any]:
        """Plain numbers."""
        return {
            **self.regime.to_json(),
            "temperatures": self.temperatures,
            "acceptance_by_position": self.acceptance,
            "fitted_positions": self.positions,
            "rounds": self.rounds,
            "held_out_rounds": self.before.survival[0].count,
            "before": self.before.to_json(),
            "after": self.after.to_json(),
        }


def regime_of(params: SamplingParams, options: Options) -> Regime:
    """The regime of parameters in which nothing is left open. Truncation means nothing at temperature 0."""
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

    Of `options` the acceptance rule, `markov_candidates` and `max_model_len` count; whole blocks are
    verified.

    Raises `ConfigError` for a pair without a confidence head, `DSparkError` for a draft that raises, and
    `RequestError` for too few rounds once the other regimes are done.
    """
    require_confidence(models)
    if len(prompts) < 2:
        raise RequestError(
            "at least 2 different prompts are needed: one half is fitted to, the other checked with"
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
    """Fits on every second prompt and scores on the others.

    Positions that too few rounds reach, to fit to or to check with, keep the temperature 1, and so do those
    whose error on the others it would not lower. Raises
    `RequestError` if even the first is one of them.
    """
    to_fit, held_out = halves(rounds)
    positions = min(reached_often(to_fit, FEWEST), reached_often(held_out, FEWEST_HELD_OUT))
    if positions == 0:
        found, checks = (int(half.is_reached(0).sum()) for half in (to_fit, held_out))
        more = "more prompts, --tokens or --samples" if regime.temperature else "more prompts or --tokens"
        raise RequestError(
            f"{regime}: {found} rounds to fit to and {checks} to check with, and {FEWEST} and "
            f"{FEWEST_HELD_OUT} are needed; {more} give more"
        )
    temperatures = that_hold([round(t, 4) for t in fit_temperatures(to_fit, positions)], held_out)
    temperatures += [1.0] * (rounds.gamma - positions)
    acceptance = [round(share, 4) for share in rounds.acceptance(positions)]
    prompts = tuple(np.unique(to_fit.prompt).tolist())
    before, after = score(held_out), score(held_out, temperatures)
    return Fitted(regime, temperatures, acceptance, positions, len(to_fit), prompts, before, after)
