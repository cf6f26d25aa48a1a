"""Runs an audit: the same pair through the engine and through the reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dspark.audit.coupled import check_coupled
from dspark.audit.greedy import check_greedy
from dspark.audit.reference import Reference
from dspark.audit.report import Report
from dspark.audit.sampled import TESTS_PER_CHECK, Law, check_sampled
from dspark.calibrate.rollout import Plan, require_drafts
from dspark.decoder import DSparkDecoder, Prompt
from dspark.errors import RequestError
from dspark.progress import Progress
from dspark.result import GenerationResult
from dspark.sampling import SamplingParams
from dspark.serve.models import Models
from dspark.serve.options import Options

FALSE_ALARM = 1e-5
"""Probability that an audit fails a correct pair by chance, over all its tests."""

CUT = 0.5
"""Confidence threshold of the run with a cut."""


def audit_pair(
    models: Models,
    options: Options,
    prompts: Sequence[Prompt],
    plan: Plan,
    progress: Progress = lambda *_: None,
) -> Report:
    """Audits a loaded pair under these options of the decoder.

    Runs: temperature 0; temperature 1; temperature 1 with a confidence cut, where the draft has a
    confidence head and the policy is "fixed"; temperature 0.8 with top-p 0.9. Each is one list of requests,
    so batches are audited too.

    Raises what `DSparkDecoder.generate` raises, for the first prompt that fails, and what `require_drafts`
    does: without a working draft, a verdict would rest on the few rounds that had one.
    """
    if not prompts:
        raise RequestError("an audit needs at least one prompt")
    reference = Reference(models.target)
    runs = list(_sampled_runs(models, options))
    level = FALSE_ALARM / (TESTS_PER_CHECK * len(runs))

    name = "temperature 0"
    progress(f"engine, {name}", 0, 1)
    results, info = _generate(models, options, prompts, _params(plan, Law(name, 0.0), 1), plan.seed)
    ends = models.end_token_ids, options.window(models)
    greedy = check_greedy(results, reference, _faults(name, results, *ends, plan), progress)

    sampled, coupled = [], []
    for number, (law, how) in enumerate(runs, 1):
        progress(f"engine, {law.name}", 0, 1)
        params = _params(plan, law, plan.samples)
        results, _ = _generate(models, how, prompts, params, plan.seed + number * len(prompts))
        faults = _faults(law.name, results, *ends, plan)
        generator = np.random.default_rng([plan.seed, number])
        sampled.append(check_sampled(results, reference, law, faults, level, generator, progress))
        if options.acceptance == "coupled":
            text = f"{law.name}, coupled text"
            coupled.append(check_coupled(text, results, plan.samples, params, reference, progress))
    return Report(info, greedy, tuple(sampled), tuple(coupled))


def _sampled_runs(models: Models, options: Options) -> Iterator[tuple[Law, Options]]:
    yield Law("temperature 1"), options
    if models.has_confidence and options.policy == "fixed":
        yield (
            Law(f"temperature 1, cut at {CUT}"),
            replace(options, policy="threshold", confidence_threshold=CUT),
        )
    yield Law("temperature 0.8, top-p 0.9", 0.8, 0.9), options


def _params(plan: Plan, law: Law, samples: int) -> SamplingParams:
    # Nothing is left to the target's generation_config.json.
    return SamplingParams(
        max_tokens=plan.tokens,
        temperature=law.temperature,
        top_p=law.top_p,
        top_k=0,
        min_p=0.0,
        repetition_penalty=1.0,
        n=samples,
    )


def _generate(
    models: Models, options: Options, prompts: Sequence[Prompt], params: SamplingParams, seed: int
) -> tuple[list[GenerationResult], dict[str, Any]]:
    # Each prompt has a seed of its own: one seed for all would give them the same noise, and the tests assume
    # that the tokens of different sequences are independent.
    each = [replace(params, seed=seed + i) for i in range(len(prompts))]
    with DSparkDecoder(lambda: models, options) as decoder:
        results: list[GenerationResult] = []
        for outcome in decoder.generate(list(prompts), each):
            results += outcome if isinstance(outcome, list) else [outcome]
        for result in results:
            if result.error is not None:
                raise result.error
        require_drafts(decoder)
        return results, decoder.info()


def _faults(
    name: str, results: Sequence[GenerationResult], ends_at: Sequence[int], window: int, plan: Plan
) -> list[str]:
    """Texts that end where they should not, and counts that do not add up."""
    found = []
    for number, result in enumerate(results):
        tokens = result.token_ids
        ends = [i for i, token in enumerate(tokens) if token in ends_at]
        room = window - len(result.prompt_token_ids)
        expected = ends[0] + 1 if ends else min(plan.tokens, room)
        if len(tokens) != expected or result.finish_reason != ("stop" if ends else "length"):
            found.append(
                f"{name}: sequence {number} has {len(tokens)} tokens and finish_reason "
                f"{result.finish_reason!r}; by its end tokens and limits it should have {expected}"
            )
        committed = sum(r.committed for r in result.rounds)
        if tokens and committed + 1 != len(tokens):
            found.append(
                f"{name}: sequence {number} has {len(tokens)} tokens, but its rounds committed {committed}; "
                f"expected {len(tokens) - 1}"
            )
    return found
