"""What is kept of an answer, and numbers over many of them with intervals by bootstrap over prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dspark.result import GenerationResult, Round
from dspark.text.looping import is_looping

RESAMPLES = 2000
LEVEL = 0.95

FEWEST = 3
"""With fewer prompts, resampling says nothing: the interval of one prompt would have no width."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer to one prompt, by one way of decoding."""

    prompt: int
    tokens: int
    rounds: tuple[Round, ...]
    """Empty for plain decoding."""
    seconds: float | None
    """From submission to the end; `None` where nothing was decoded."""
    looping: bool

    @classmethod
    def of(cls, prompt: int, result: GenerationResult) -> Answer:
        """Makes one from a result of the engine, without the rounds of plain decoding, which say nothing."""
        rounds = () if result.speculation.startswith("off") else result.rounds
        looping = is_looping(result.token_ids)
        return cls(prompt, len(result.token_ids), rounds, result.timing.total_s, looping)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number and its 95 % interval, if there were enough prompts for one."""

    value: float
    low: float | None
    high: float | None

    def times(self, factor: float) -> Estimate:
        """The same in another unit."""
        low, high = (None if bound is None else factor * bound for bound in (self.low, self.high))
        return Estimate(factor * self.value, low, high)

    def to_json(self) -> dict[str, float | None]:
        """Plain numbers."""
        return {"value": self.value, "low": self.low, "high": self.high}


Sums = NDArray[np.float64]
"""One sum for each prompt."""


def by_prompt(answers: Sequence[Answer], prompts: Sequence[int], what: Callable[[Answer], float]) -> Sums:
    """The sums of a number over the answers to each of `prompts`."""
    place = {prompt: i for i, prompt in enumerate(prompts)}
    sums = np.zeros(len(prompts))
    for answer in answers:
        sums[place[answer.prompt]] += what(answer)
    return sums


def ratio(above: Sequence[Sums], below: Sequence[Sums]) -> Estimate | None:
    """(above[0] / below[0]) / (above[1] / below[1]) / ..., each summed over the prompts; `None` if a
    denominator is 0.

    The interval is the percentile bootstrap over prompts: all answers to one prompt, by different ways of
    decoding too, are drawn together. Below `FEWEST` prompts there is none. The generator is the same for
    every number, so that a report can be repeated.
    """
    count = len(above[0])
    if count == 0 or not all(sums.sum() > 0 for sums in [*below, *above[1:]]):
        return None

    def quotient(weights: NDArray[np.int64]) -> NDArray[np.float64]:
        parts = [(weights @ a) / (weights @ b) for a, b in zip(above, below, strict=True)]
        value: NDArray[np.float64] = parts[0]
        for part in parts[1:]:
            value = value / part
        return value

    value = float(quotient(np.ones((1, count), dtype=np.int64))[0])
    if min(np.count_nonzero(sums) for sums in below) < FEWEST:
        return Estimate(value, None, None)
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = quotient(_draws(count))
    low, high = np.quantile(drawn[np.isfinite(drawn)], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(value, float(low), float(high))


@lru_cache(maxsize=8)
def _draws(count: int) -> NDArray[np.int64]:
    """`[RESAMPLES, count]`: how often each prompt is drawn. Cached: hundreds of numbers use these draws."""
    draws = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    draws.setflags(write=False)
    return draws
