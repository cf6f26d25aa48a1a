"""The loop: steps, reports, evaluations, checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dspark.durations import duration
from dspark.errors import NumericsError
from dspark.train.data.conversations import Conversation
from dspark.train.examples import Order
from dspark.train.optimiser import Optimiser, Rate
from dspark.train.report import Log, Say
from dspark.train.step import Measured, Stepper
from dspark.train.world import World

MOST_SKIPPED = 10
"""Steps in a row with gradients that are not finite, after which the run is given up."""

CHECKPOINT_SHARE = 20
"""The time between two checkpoints is at least this many times what the last one took, so that a slow disk
does not hold up the run (unless a checkpoint is asked for after each step)."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a run is, and how often it reports, evaluates and saves; steps are optimiser steps.

    Attributes:
        steps: of the whole run. sequences: in each step, over all processes.
        report_every, evaluate_every: steps. checkpoint_seconds: between checkpoints, at least.
        stop_after: seconds from the start of the command, after which it ends with a checkpoint, to be
            resumed; generation and hidden states count, but are not cut short. None: no limit.
    """

    steps: int
    sequences: int
    report_every: int = 20
    evaluate_every: int = 500
    checkpoint_seconds: float = 600.0
    stop_after: float | None = None


@dataclass(slots=True)
class Progress:
    """Where a run is: steps done, seconds spent in steps, tokens of the sequences seen, and how many of the
    steps changed nothing because their gradients were not finite."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    skipped: int = 0


class Loop:
    """Continues a run from where it is to its end, or until it has to stop."""

    def __init__(
        self,
        stepper: Stepper,
        optimiser: Optimiser,
        conversations: Sequence[Conversation],
        world: World,
        *,
        pace: Pace,
        rate: Rate,
        clip: float,
        seed: int,
        started: float,
        evaluate: Callable[[], dict[str, Any]],
        checkpoint: Callable[[Progress], None],
        log: Log | None,
        say: Say,
    ) -> None:
        """`started`: when the command started, by `time.monotonic`. `evaluate` measures on held-out text
        (called on every process), `checkpoint` writes the state."""
        self._stepper, self._optimiser, self._world = stepper, optimiser, world
        self._conversations, self._order = conversations, Order(len(conversations), seed)
        self._pace, self._rate, self._clip, self._started = pace, rate, clip, started
        self._evaluate, self._checkpoint, self._log, self._say = evaluate, checkpoint, log, say
        self.stop = False
        """Set from outside (by a signal): the run ends after the current step, with a checkpoint."""

    def run(self, at: Progress) -> Progress:
        """Runs until the last step, `stop`, or the end of the time given. The last state is always saved.

        Raises:
            NumericsError: `MOST_SKIPPED` gradients in a row were not finite.
        """
        pace, saved, wait = self._pace, time.monotonic(), self._pace.checkpoint_seconds
        first, in_a_row = replace(at), 0
        while at.step < pace.steps and not self._ends():
            began = time.monotonic()
            measured, rate, norm = self._step(at.step)
            at.step += 1
            at.seconds += time.monotonic() - began
            at.tokens += measured.tokens
            in_a_row = 0 if math.isfinite(norm) else in_a_row + 1
            if in_a_row:
                at.skipped += 1
                self._say(f"step {at.step:,}: the gradient is not finite, so the step is skipped")
            if in_a_row == MOST_SKIPPED:
                raise NumericsError(
                    f"the gradients of {in_a_row} steps in a row, up to step {at.step:,}, were not finite: a "
                    "lower --learning-rate, or no --bf16, may help"
                )
            last = at.step == pace.steps
            if at.step % pace.report_every == 0 or last or at.step == first.step + 1:
                self._report(at, first, measured, rate, norm)
            if at.step % pace.evaluate_every == 0 or last:
                self._measure(at)
            if self._world.any(time.monotonic() - saved >= wait):
                began = time.monotonic()
                self._checkpoint(at)
                saved = time.monotonic()
                if wait:
                    wait = max(pace.checkpoint_seconds, CHECKPOINT_SHARE * (saved - began))
        if at.step > first.step:
            self._checkpoint(at)
        return at

    def _ends(self) -> bool:
        limit = self._pace.stop_after
        return self._world.any(self.stop or (limit is not None and time.monotonic() - self._started >= limit))

    def _step(self, step: int) -> tuple[Measured, float, float]:
        count = self._pace.sequences
        chosen = [self._conversations[self._order[step * count + i]] for i in range(count)]
        measured = self._stepper.gradient(step, chosen, step / self._pace.steps)
        rate = self._rate.at(step)
        return measured, rate, self._optimiser.step(rate, self._clip)

    def _report(self, at: Progress, first: Progress, measured: Measured, rate: float, norm: float) -> None:
        """`first`: where this command began; an earlier one may have been faster or slower."""
        if self._log is None:
            return
        per_step = (at.seconds - first.seconds) / (at.step - first.step)
        left = (self._pace.steps - at.step) * per_step
        self._log.write(
            at.step,
            {
                "loss": measured.loss,
                **measured.terms,
                "expected_length": measured.expected_length,
                "by_position": measured.by_position,
                "rate": rate,
                "gradient_norm": norm,
                "skipped": at.skipped,
                "tokens": at.tokens,
                "hours": at.seconds / 3600,
            },
        )
        self._say(
            f"step {at.step:,}/{self._pace.steps:,}: loss {measured.loss:.4f}, expected length "
            f"{measured.expected_length:.3f}, {per_step:.2f} s a step, {duration(left)} left"
        )

    def _measure(self, at: Progress) -> None:
        found = self._evaluate()
        if self._log is None or not found:
            return
        self._log.write(at.step, {"held_out": found, "tokens": at.tokens, "hours": at.seconds / 3600})
        lengths = ", ".join(f"{v['expected_length']:.3f} at temperature {t}" for t, v in found.items())
        self._say(f"step {at.step:,}: held-out expected acceptance length {lengths}")
