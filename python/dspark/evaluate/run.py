"""Evaluates a pair: each prompt with the draft and without, one after the other, and the baselines.

Requests run alone, so that tokens per second are what one user sees, and the two sides of a prompt run back
to back, so that other load on the machine affects both. Each pass through the prompts has a fresh engine: one
that had seen them before would save their prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
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

Job = tuple[int, Prompt, SamplingParams]
"""The number of a prompt, the prompt, and the parameters of an answer to it."""

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
    error: dict[str, str] | None = None
    """Type and message of what ended it early: regimes are missing."""

    def to_json(self) -> dict[str, Any]:
        """Plain numbers."""
        return {
            "info": self.info,
            "methods": dict(METHODS),
            "regimes": [regime.to_json() for regime in self.regimes],
            **({} if self.error is None else {"error": self.error}),
        }


class Evaluator:
    """Evaluates a loaded pair on texts by data set, with each of the sampling parameters in turn."""

    def __init__(
        self,
        models: Models,
        data_sets: Mapping[str, Sequence[str]],
        regimes: Sequence[SamplingParams],
        plan: Plan,
        options: Options,
        template: Mapping[str, Any] | None = None,
    ) -> None:
        """`template`: keywords of the target's chat template.

        Raises `ConfigError` without a draft, and what `render` raises.
        """
        if models.draft is None:
            raise ConfigError("there is no draft to evaluate: give --draft DIR")
        if ALL in data_sets and len(data_sets) > 1:
            raise RequestError(f"a data set cannot be called {ALL}, which stands for all of them")
        self._models, self._plan, self._options, self._template = models, plan, options, template
        self._has_markov = models.draft.markov_head is not None
        self._prompts = render(models, data_sets, options.window(models), template)
        self._names = [name for name, texts in data_sets.items() for _ in texts]
        filled = [params.with_defaults(models.generation_config) for params in regimes]
        self._regimes = {regime_of(params, options): params for params in filled}
        self._about = {
            "dspark": __version__,
            "data_sets": {name: len(texts) for name, texts in data_sets.items()},
            "plan": asdict(plan),
            "template_options": dict(template) if template else None,
        }
        self.info: dict[str, Any] = {}
        """That of an `Evaluation`, as soon as a regime has begun."""

    def run(self, progress: Progress = lambda *_: None) -> Iterator[Evaluated]:
        """Each regime as it is done. Raises what `DSparkDecoder.generate` and `require_drafts` raise."""
        for regime, params in self._regimes.items():
            jobs = _jobs(params, self._plan, self._prompts)
            which = [job[0] for job in jobs]
            plain, draft = self._in_turns(jobs, partial(progress, str(regime)))
            answers = {
                "plain": [Answer.of(p, result) for p, result in zip(which, plain, strict=True)],
                "draft": [Answer.of(p, result) for p, result in zip(which, draft, strict=True)],
                "ngram": [self._looked_up(p, result) for p, result in zip(which, plain, strict=True)],
            }
            if self._has_markov:
                without = partial(progress, f"{regime}, without the Markov head")
                answers["block"] = self._without_markov(jobs, without)
            ordered = {method: answers[method] for method in METHODS if method in answers}
            rounds = judged_rounds(draft, which, self._width)
            head = score_head(
                self._models, regime, rounds, self._prompts, self._options.policy, self._template
            )
            yield Evaluated(regime, _table(self._names, ordered, self._width), head)

    @property
    def _width(self) -> int:
        return self._models.drafted_per_round(self._options.block_size)

    def _in_turns(
        self, jobs: Sequence[Job], progress: Callable[[int, int], None]
    ) -> tuple[list[GenerationResult], list[GenerationResult]]:
        """The answers of the target alone, and those with the draft."""
        plain: list[GenerationResult] = []
        draft: list[GenerationResult] = []
        prompts = self._prompts
        for start in range(0, len(jobs), len(prompts)):
            with DSparkDecoder(lambda: self._models, self._options) as decoder:
                self.info = self.info or decoder.info() | self._about
                # First passes are slower, on both sides. Reversed, so that no later prompt begins like it.
                for drafting in (False, True):
                    first = replace(jobs[0][2], max_tokens=16, ignore_eos=True, speculative=drafting)
                    decoder.generate(prompts[0][::-1], first)
                for number, (_, prompt, params) in enumerate(jobs[start : start + len(prompts)], start):
                    progress(number, len(jobs))
                    plain.append(decoder.generate(prompt, replace(params, speculative=False)))
                    draft.append(decoder.generate(prompt, params))
                    require_drafts(decoder)
        return plain, draft

    def _without_markov(self, jobs: Sequence[Job], progress: Callable[[int, int], None]) -> list[Answer]:
        """The answers with whole blocks of the draft without its Markov head."""
        bare = without_markov(self._models)
        fixed = replace(
            self._options,
            policy="fixed",
            confidence_threshold=None,
            cost_table=None,
            budget_lag=None,
            calibration=None,
        )
        found = []
        with DSparkDecoder(lambda: bare, fixed) as decoder:
            for number, (p, prompt, params) in enumerate(jobs):
                progress(number, len(jobs))
                answer = Answer.of(p, decoder.generate(prompt, params))
                require_drafts(decoder)
                found.append(replace(answer, seconds=None))  # not run beside plain: no fair speed
        return found

    def _looked_up(self, prompt: int, plain: GenerationResult) -> Answer:
        """What n-gram lookup would have drafted of an answer of the target alone."""
        room = self._options.window(self._models) - len(plain.prompt_token_ids)
        most = min(self._plan.tokens, room)
        rounds = lookup_rounds(plain.prompt_token_ids, plain.token_ids, self._width, most)
        return replace(Answer.of(prompt, plain), rounds=rounds, seconds=None)


def _jobs(params: SamplingParams, plan: Plan, prompts: Sequence[Prompt]) -> list[Job]:
    """One of each answer."""
    samples = 1 if params.temperature == 0 else plan.samples
    return [
        (p, prompt, replace(params, max_tokens=plan.tokens, seed=plan.seed + s * len(prompts) + p))
        for s in range(samples)
        for p, prompt in enumerate(prompts)
    ]


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
