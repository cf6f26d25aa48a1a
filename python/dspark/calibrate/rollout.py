"""The first step of measuring a pair: it answers prompts, verifying whole blocks for a calibration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dspark._core import Calibration
from dspark.decoder import DSparkDecoder, Prompt
from dspark.errors import ConfigError, DSparkError, RequestError
from dspark.result import GenerationResult
from dspark.sampling import SamplingParams
from dspark.serve.models import Models
from dspark.serve.options import Options

BATCH = 8
"""Requests that are decoded together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much to run."""

    tokens: int = 128
    """Per answer at most."""
    samples: int = 4
    """Answers to each prompt above temperature 0; at 0 there is one."""
    seed: int = 0
    """Of the first answer, or of an audit's first prompt; the others count up from it."""

    def __post_init__(self) -> None:
        for name in ("tokens", "samples"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 <= self.seed < 1 << 63:
            raise RequestError(f"seed must be a whole number from 0 to 2^63 - 1, not {self.seed}")


def require_confidence(models: Models) -> None:
    """Raises `ConfigError` for models that give no confidences."""
    if models.draft is None:
        raise ConfigError("confidences come from a draft, but there is no draft: give --draft DIR")
    if not models.has_confidence:
        raise ConfigError(f"{models.paths[1]}: this draft has no confidence head")


def whole_blocks(options: Options, gamma: int) -> Options:
    """Options with the same rule and chain, every drafted token verified, and the head's own confidences.

    Blocks are whole whatever `block_size` says: temperatures go by position, shorter blocks have the first.
    """
    own = Calibration([1.0] * gamma, gamma)
    return replace(
        options,
        policy="fixed",
        confidence_threshold=None,
        block_size=None,
        cost_table=None,
        budget_lag=None,
        calibration=own,
        max_batch_size=BATCH,
    )


def require_drafts(decoder: DSparkDecoder) -> None:
    """Raises `DSparkError` if a draft has failed in this decoder. Serving goes on without the draft, but a
    measurement would take rounds without it for rounds in which nothing was accepted."""
    stats = decoder.stats()
    if stats["draft_failures"]:
        raise DSparkError(f"the draft failed, so nothing can be measured: {stats['draft_failure']}")


def roll_out(
    decoder: DSparkDecoder,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    plan: Plan,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> tuple[list[GenerationResult], list[int]]:
    """Answers, and for each of them the number of its prompt.

    Raises what `DSparkDecoder.generate` raises, for the first prompt that fails, and what `require_drafts`
    does.
    """
    samples = 1 if params.temperature == 0 else plan.samples
    jobs = [(p, plan.seed + s * len(prompts) + p) for s in range(samples) for p in range(len(prompts))]
    results: list[GenerationResult] = []
    for start in range(0, len(jobs), BATCH):
        progress(start, len(jobs))
        part = jobs[start : start + BATCH]
        answers = decoder.generate(
            [prompts[p] for p, _ in part],
            [replace(params, seed=seed, max_tokens=plan.tokens) for _, seed in part],
        )
        for answer in answers:
            if answer.error is not None:
                raise answer.error
        require_drafts(decoder)
        results += answers
    return results, [p for p, _ in jobs]
