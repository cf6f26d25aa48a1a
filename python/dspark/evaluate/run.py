"""Evaluates a pair: each prompt with the draft and without, one after the other, and the baselines.

Requests run alone, so that tokens per second are what one user sees, and the two sides of a prompt run back
to back, so that other load on the machine affects both. Each pass through the prompts has a fresh engine: one
that had seen them before would save their prefill.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from dspark import __version__
from dspark.calibrate.prompts import render
from dspark.calibrate.rollout import Plan, require_drafts
from dspark.calibrate.rounds import judged_rounds
from dspark.calibrate.run import regime_of
from dspark.checkpoint.calibration import Regime
from dspark.decoder import DSparkDecoder, Prompt
from dspark.errors import ConfigError, RequestError
from dspark.evaluate.answers import Answer
from dspark.evaluate.head import Head, score_head
from dspark.evaluate.ngram import lookup_rounds
from dspark.evaluate.numbers import Measured, measure
from dspark.progress import Progress
from dspark.result import GenerationResult
from dspark.sampling import SamplingParams
from dspark.serve.models import Models
from dspark.serve.options import Options

ALL = "all"
"""The name that stands for all data sets together."""

METHODS = {
    "plain": "the target alone",
    "draft": "the draft",
    "block": "the same draft with its Markov head switched off, whole blocks verified",
    "ngram": "n-gram lookup, without a model",
}
"""Ways of decoding, and what they are."""


class WithoutMarkov(Models):
    """The same models, drafting each position independently. The confidence head reads the Markov embedding,
    so it is off too."""

    __slots__ = ()

    def heads(self) -> dict[str, Any]:
        """The remaining heads."""
        kept = Models.heads(self)
        return {name: head for name, head in kept.items() if name not in ("markov", "confidence")}

    @property
    def has_confidence(self) -> bool:
        """Never."""
        return False

    def _sampler(self) -> None:
        """None, since the kernels' chains use the draft's own heads: even on a GPU, the core decides."""
        return


def without_markov(models: Models) -> WithoutMarkov:
    """The same models as a plain block drafter."""
    return WithoutMarkov(**{field.name: getattr(models, field.name) for field in fields(models)})


@dataclass(frozen=True, slots=True)
class Evaluated:
    """One regime."""

    regime: Regime
    measured: Mapping[str, Mapping[str, Measured]]
    """By data set, then by method. With a single data set there is only "all"."""
    head: Head

    def to_json(self) -> dict[str, Any]:
        """Plain numbers."""
        return {
            **self.regime.to_json(),
            "data_sets": {
                name: {method: m.to_json() for method, m in methods.items()}
                for name, methods in self.measured.items()
            },
            **self.head.to_json(),
        }


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The whole evaluation."""

    info: dict[str, Any]
    """What was measured, on what, and how: `data_sets` has the number of prompts of each."""
    regimes: list[Evaluated]

    def to_json(self) -> dict[str, Any]:
        """Plain numbers."""
        return {
            "info": self.info,
            "methods": dict(METHODS),
            "regimes": [regime.to_json() for regime in self.regimes],
        }


def evaluate_pair(
    models: Models,
    data_sets: Mapping[str, Sequence[str]],
    regimes: Sequence[SamplingParams],
    plan: Plan,
    options: Options,
    progress: Progress = lambda *_: None,
    template: Mapping[str, Any] | None = None,
) -> Evaluation:
    """Evaluates a loaded pair on texts by data set, for each of the sampling parameters. `template`: keywords
    of the target's chat template.

    Raises `ConfigError` without a draft, and what `render`, `DSparkDecoder.generate` and `require_drafts`
    raise.
    """
    if models.draft is None:
        raise ConfigError("there is no draft to evaluate: give --draft DIR")
    if ALL in data_sets and len(data_sets) > 1:
        raise RequestError(f"a data set cannot be called {ALL}, which stands for all of them")
    prompts = render(models, data_sets, options.window(models), template)
    answers: dict[tuple[Regime, str], list[Answer]] = {}
    raw: dict[Regime, list[GenerationResult]] = {}
    info: dict[str, Any] = {}
    width = models.drafted_per_round(options.block_size)
    names = [name for name, texts in data_sets.items() for _ in texts]
    filled = [params.with_defaults(models.generation_config) for params in regimes]
    keyed = {regime_of(params, options): params for params in filled}
    for regime, params in keyed.items():
        jobs = _jobs(params, plan, prompts)
        plain: list[GenerationResult] = []
        draft: list[GenerationResult] = []
        for start in range(0, len(jobs), len(prompts)):
            with DSparkDecoder(lambda: models, options) as decoder:
                info = info or decoder.info()
                # First passes are slower, on both sides. Reversed, so that no later prompt begins like it.
                for drafting in (False, True):
                    first = replace(params, max_tokens=16, ignore_eos=True, speculative=drafting)
                    decoder.generate(prompts[0][::-1], first)
                for number, (_, prompt, each) in enumerate(jobs[start : start + len(prompts)], start):
                    progress(str(regime), number, len(jobs))
                    plain.append(decoder.generate(prompt, replace(each, speculative=False)))
                    draft.append(decoder.generate(prompt, each))
                    require_drafts(decoder)
        answers[regime, "plain"] = [Answer.of(p, r) for (p, _, _), r in zip(jobs, plain, strict=True)]
        answers[regime, "draft"] = [Answer.of(p, r) for (p, _, _), r in zip(jobs, draft, strict=True)]
        answers[regime, "ngram"] = [
            _looked_up(p, r, width, min(plan.tokens, options.window(models) - len(r.prompt_token_ids)))
            for (p, _, _), r in zip(jobs, plain, strict=True)
        ]
        raw[regime] = draft
    if models.draft.markov_head is not None:
        bare = without_markov(models)
        fixed = replace(
            options,
            policy="fixed",
            confidence_threshold=None,
            cost_table=None,
            budget_lag=None,
            calibration=None,
        )
        with DSparkDecoder(lambda: bare, fixed) as decoder:
            for regime, params in keyed.items():
                jobs = _jobs(params, plan, prompts)
                found = answers[regime, "block"] = []
                for number, (p, prompt, each) in enumerate(jobs):
                    progress(f"{regime}, without the Markov head", number, len(jobs))
                    answer = Answer.of(p, decoder.generate(prompt, each))
                    require_drafts(decoder)
                    found.append(replace(answer, seconds=None))  # not run beside plain: no fair speed
    done = []
    for regime in keyed:
        which = [job[0] for job in _jobs(keyed[regime], plan, prompts)]
        by_method = {m: answers[regime, m] for m in METHODS if (regime, m) in answers}
        table = _table(names, by_method, width)
        rounds = judged_rounds(raw[regime], which, width)
        done.append(
            Evaluated(regime, table, score_head(models, regime, rounds, prompts, options.policy, template))
        )
    about = {
        "dspark": __version__,
        "data_sets": {name: len(texts) for name, texts in data_sets.items()},
        "plan": asdict(plan),
        "template_options": dict(template) if template else None,
    }
    return Evaluation(info | about, done)


def _jobs(
    params: SamplingParams, plan: Plan, prompts: Sequence[Prompt]
) -> list[tuple[int, Prompt, SamplingParams]]:
    """(number of the prompt, prompt, parameters) of each answer."""
    samples = 1 if params.temperature == 0 else plan.samples
    return [
        (p, prompt, replace(params, max_tokens=plan.tokens, seed=plan.seed + s * len(prompts) + p))
        for s in range(samples)
        for p, prompt in enumerate(prompts)
    ]


def _looked_up(prompt: int, plain: GenerationResult, width: int, max_tokens: int) -> Answer:
    rounds = lookup_rounds(plain.prompt_token_ids, plain.token_ids, width, max_tokens)
    return replace(Answer.of(prompt, plain), rounds=rounds, seconds=None)


def _table(
    names: Sequence[str], answers: Mapping[str, list[Answer]], width: int
) -> dict[str, dict[str, Measured]]:
    """The numbers by data set and method. `names` has each prompt's data set; rounds draft `width` tokens."""
    table: dict[str, dict[str, Measured]] = {}
    sets = list(dict.fromkeys(names))
    for name in [*sets, ALL] if len(sets) > 1 else [ALL]:
        chosen = {
            method: [a for a in found if name == ALL or names[a.prompt] == name]
            for method, found in answers.items()
        }
        table[name] = {m: measure(found, chosen["plain"], width) for m, found in chosen.items()}
    return table
