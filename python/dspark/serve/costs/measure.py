"""Timing the passes of a loaded pair, through the runner that the engine uses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark import _core
from dspark.kernels.sampler import Sampler
from dspark.sampling import SamplingParams
from dspark.serve.costs.record import Costs
from dspark.serve.models import Models
from dspark.serve.runner import Runner

RULE = "rejection"
"""The rule of the chain that is timed; under another rule, live rounds correct the cost."""

SPREAD = 7919
"""Made-up token ids are multiples of this prime, so that successive tokens read different embeddings."""

LEAST = (1, 8, 32)
"""Widths, in tokens of one request, that are timed however slow the target is, up to the batch's widest pass:
from fewer the slope is not known, and every width would seem to cost the same."""

FED = 2
"""Tokens that a round with a draft adds to the draft's context, roughly."""

NARROW = 4
"""The most tokens per request when several are timed: what a request adds shows best if tokens add little."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How thorough a measurement is."""

    seconds: float
    """Points other than `LEAST` are skipped if, by the point before, they would end later than this."""
    context: int
    """Positions in each request's caches."""
    requests: int
    """The most requests at once: each further request adds the same cost."""
    repeats: int
    """The most timed runs of a point; one run to warm up comes before them."""
    share: float
    """Seconds for one point's timed runs; a longer run is timed once."""


AT_START = Effort(seconds=1.0, context=64, requests=4, repeats=3, share=0.05)
THOROUGH = Effort(seconds=60.0, context=128, requests=8, repeats=9, share=1.0)


def measure(
    models: Models, *, block_size: int, max_batch_size: int, candidates: int | None, effort: Effort
) -> Costs:
    """Measures a pair that has a draft, on the engine's thread before the engine serves.

    Made-up requests are prefilled, verified, drafted for and released like real ones. Wide passes come
    last, so that a slow model runs out of time where a straight line is the best guess anyway. A run that
    takes longer than the whole effort is not repeated.
    """
    with torch.inference_mode():
        return _Bench(models, block_size, max_batch_size, candidates, effort).run()


class _Bench:
    """One measurement: a runner of its own and the requests in it."""

    def __init__(
        self, models: Models, block_size: int, max_batch_size: int, candidates: int | None, effort: Effort
    ) -> None:
        self.started = time.perf_counter()
        self.models, self.effort, self.candidates = models, effort, candidates
        self.runner: Runner = models.runner()
        self.batch = max_batch_size
        self.gamma = models.gamma
        # A block and the fed tokens must fit behind the context, even in a window of a few dozen positions.
        self.context = max(1, min(effort.context, models.window // 2))
        self.widest = max_batch_size * (1 + block_size)
        self.ids: list[int] = []
        self.fed = 0  # positions behind the context of request 1

    def run(self) -> Costs:
        try:
            self._admit(1)
            self._warm_up()
            passes = list(self._passes(1, widest=self.widest, reserve=0.4))
            draft = [(1, self._drafting(1))]
            token_seconds = self._chain()
            few = min(self.effort.requests, self.batch)
            # A recurrent target cannot be forked at a point that it has passed: it reads the prompts again.
            prompts = (few - 1) * self.context if self.runner.forks_at_parts else 0
            if few > 1 and self._has_time(prompts * passes[-1][2] / passes[-1][0]):
                self._admit(few)
                draft.append((few, self._drafting(few)))
                passes += self._passes(few, widest=few * NARROW, reserve=0.0)
        finally:
            self.runner.release(self.ids)
        return Costs(
            passes=tuple(passes),
            draft=tuple(draft),
            token_seconds=token_seconds,
            widest=self.widest,
            context=self.context,
            repeats=self.effort.repeats,
            seconds=time.perf_counter() - self.started,
        )

    def _warm_up(self) -> None:
        """Loads a GPU's kernels by the first passes of the process, which do not count as measuring time."""
        if self.models.target.device.type == "cuda":
            self._verify(1, 1)
            self._draft(1)
            self._wait()
            self.started = time.perf_counter()

    def _admit(self, count: int) -> None:
        """Adds requests with one made-up prompt until there are `count`: copies of the first if possible."""
        for request in range(len(self.ids) + 1, count + 1):
            taken = self.runner.fork(request, 1, self.context, True) if self.ids else 0
            self.ids.append(request)
            if taken < self.context:
                self.runner.prefill([request], [self._tokens(self.context)[taken:]], [True])

    def _tokens(self, count: int) -> list[int]:
        vocabulary = self.models.target.config.vocab_size
        return [i * SPREAD % vocabulary for i in range(count)]

    def _passes(self, requests: int, widest: int, reserve: float) -> Iterator[tuple[int, int, float]]:
        """Times the target over 1, 2, 4, .. tokens of each request, up to `widest` tokens in all.

        `reserve` is the share of the whole time to leave for other measurements.
        """
        room = self.models.window - self.context
        tokens, latest = requests, 0.0
        while tokens <= widest and tokens // requests <= room:
            # At most: twice as wide takes twice as long as the point before, and runs twice (one warm-up).
            is_due = not latest or self._has_time(4 * latest + reserve * self.effort.seconds)
            if is_due or (requests == 1 and tokens in LEAST):
                latest = self._time(lambda each=tokens // requests: self._verify(requests, each))  # type: ignore[misc]
                yield tokens, requests, latest
            tokens = widest if tokens < widest < 2 * tokens else 2 * tokens

    def _verify(self, requests: int, each: int) -> Tensor:
        tokens = self._tokens(requests * each)
        return self.runner.verify(self.ids[:requests], tokens, [each] * requests)

    def _draft(self, requests: int) -> tuple[Tensor, Tensor | None]:
        return self.runner.draft(self.ids[:requests], self._tokens(requests))

    def _chain(self) -> float:
        """Seconds per drafted token of the Markov chain, at the target's usual sampling.

        Drawn where rounds draw it: by kernels on the models' device, or by the core, for which rows that are
        elsewhere are copied to the host.
        """
        base, hidden = self._draft(1)
        params = SamplingParams().with_defaults(self.models.generation_config)
        noise = _core.Noise(0, 0)
        sampler = self.runner.sampler

        def by_kernels(sampler: Sampler) -> None:
            history: list[tuple[list[int], list[int]]] = [([], [])]
            sampler.run(
                _core.ChainPlan(
                    [1], base, hidden, sampler.heads, RULE, [params], [noise], history, gamma=self.gamma
                )
            )

        def by_core() -> None:
            here = None if hidden is None else hidden.cpu()
            _core.draft_chain(1, base.cpu(), here, heads, RULE, params, noise, candidates=self.candidates)

        if sampler is not None and self.candidates is None:
            return self._time(lambda: by_kernels(sampler)) / self.gamma
        heads = self.models.heads()
        return self._time(by_core) / self.gamma

    def _drafting(self, requests: int) -> float:
        """Seconds of a draft pass and of feeding the tokens that its round keeps."""
        draft = self._time(lambda: self._draft(requests))
        room = self.models.window - self.context - max(self.gamma, NARROW)
        times: list[float] = []
        while self.fed + FED <= room and self._goes_on(times):
            self.fed += FED
            self._draft(requests)  # requests that drafted are fed at once
            self._verify(requests, FED)
            self._wait()
            start = time.perf_counter()
            self.runner.commit(self.ids[:requests], [FED] * requests)
            self._wait()
            times.append(time.perf_counter() - start)
        return draft + min(times, default=0.0)

    def _time(self, run: Callable[[], object]) -> float:
        """Seconds of the shortest of a few runs, the first of which warms up."""
        times: list[float] = []
        while self._goes_on(times):
            start = time.perf_counter()
            run()
            self._wait()
            times.append(time.perf_counter() - start)
        return min(times)

    def _goes_on(self, times: list[float]) -> bool:
        """Whether to run once more: the first run warms up, unless it is too long for another to follow."""
        effort = self.effort
        is_long = bool(times) and times[0] > effort.seconds
        return not is_long and len(times) <= effort.repeats and sum(times[1:]) <= effort.share

    def _wait(self) -> None:
        """Waits for a GPU, whose passes return before they have finished."""
        if self.models.target.device.type == "cuda":
            torch.cuda.synchronize(self.models.target.device)

    def _has_time(self, seconds: float) -> bool:
        return time.perf_counter() - self.started + seconds <= self.effort.seconds
