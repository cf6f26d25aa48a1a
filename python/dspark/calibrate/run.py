"""Calibrates a pair: rollouts, the fit on half of the prompts, the scores on the other half."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dspark.calibrate.fit import FEWEST, fit_temperatures, require_enough
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
    rounds: int
    """Rounds that it was fitted to."""
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
) -> list[Fitted]:
    """Fits the temperatures of a loaded pair for each of the sampling parameters.

    Of `options` the acceptance rule, `markov_candidates` and `max_model_len` count; whole blocks are
    verified.

    Raises `ConfigError` for a pair without a confidence head and `RequestError` for too few rounds.
    """
    require_confidence(models)
    if len(prompts) < 2:
        raise RequestError("at least 2 prompts are needed: one half is fitted to, the other checked with")
    options = whole_blocks(options or Options(), models.gamma)
    fitted: dict[Regime, Fitted] = {}
    with DSparkDecoder(lambda: models, options) as decoder:
        for given in regimes:
            params = given.with_defaults(models.generation_config)
            regime = regime_of(params, options)
            if regime in fitted:
                continue
            results, which = roll_out(decoder, prompts, params, plan, partial(progress, str(regime)))
            fitted[regime] = fit_regime(regime, judged_rounds(results, which, models.gamma))
    return list(fitted.values())


def fit_regime(regime: Regime, rounds: JudgedRounds) -> Fitted:
    """Fits on every second prompt and scores on the others; raises `RequestError` for too few rounds."""
    to_fit, held_out = halves(rounds)
    require_enough(to_fit, f"{regime}, rounds to fit to", FEWEST)
    require_enough(held_out, f"{regime}, rounds to check with", FEWEST_HELD_OUT)
    temperatures = [round(t, 4) for t in fit_temperatures(to_fit)]
    return Fitted(regime, temperatures, len(to_fit), score(held_out), score(held_out, temperatures))
