"""What rounds show of a confidence head: its confidences, and how far each block was accepted."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark.calibrate.metrics import Numbers, Outcomes
from dspark.result import GenerationResult, Round


@dataclass(frozen=True, slots=True)
class JudgedRounds:
    """Rounds whose drafted tokens were verified.

    Position k (from 0) of a round is *judged* where the round says whether the whole prefix of k + 1 tokens
    was accepted, and *reached* where in addition the k tokens before it were: there it says whether the
    token itself was.
    """

    confidences: Numbers
    """`[rounds, gamma]`, not calibrated; what was not drafted is 1/2 and never judged."""
    judged: NDArray[np.int64]
    """`[rounds]`: positions that were judged."""
    accepted: NDArray[np.int64]
    """`[rounds]`: tokens that were accepted."""
    prompt: NDArray[np.int64]
    """`[rounds]`: which prompt it was. Rounds of one text resemble each other."""

    def __len__(self) -> int:
        return len(self.judged)

    @property
    def gamma(self) -> int:
        """Positions of a block."""
        return int(self.confidences.shape[1])

    def select(self, rows: Outcomes) -> JudgedRounds:
        """Those rounds alone."""
        return JudgedRounds(self.confidences[rows], self.judged[rows], self.accepted[rows], self.prompt[rows])

    def is_judged(self, k: int) -> Outcomes:
        """`[rounds]`: whether position k was judged."""
        return self.judged > k

    def is_reached(self, k: int) -> Outcomes:
        """`[rounds]`: whether position k was judged and everything before it accepted."""
        return (self.judged > k) & (self.accepted >= k)

    def acceptance(self, positions: int) -> list[float]:
        """Of the first positions: how often the token was accepted where the ones before it were; ends before
        the first that was never reached."""
        reached = (self.is_reached(k) for k in range(positions))
        known = enumerate(itertools.takewhile(np.any, reached))
        return [float(self.survived(k)[rows].mean()) for k, rows in known]

    def survived(self, k: int) -> Outcomes:
        """`[rounds]`: whether the tokens up to position k, itself included, were accepted."""
        return self.accepted > k


def judged_positions(r: Round) -> int:
    """How many positions a round says something about. One that ended its text at an accepted token says
    nothing about what was drafted after that token."""
    return r.verified if r.committed > r.accepted else r.accepted


def judged_rounds(results: Sequence[GenerationResult], prompts: Sequence[int], gamma: int) -> JudgedRounds:
    """The rounds of these results; `prompts` says for each result which prompt it answers."""
    rounds = [(r, p) for result, p in zip(results, prompts, strict=True) for r in result.rounds if r.verified]
    confidences = np.full((len(rounds), gamma), 0.5)
    for row, (r, _) in enumerate(rounds):
        confidences[row, : len(r.confidence)] = r.confidence
    return JudgedRounds(
        confidences,
        np.array([judged_positions(r) for r, _ in rounds], dtype=np.int64),
        np.array([r.accepted for r, _ in rounds], dtype=np.int64),
        np.array([p for _, p in rounds], dtype=np.int64),
    )


def parts(rounds: JudgedRounds) -> tuple[JudgedRounds, JudgedRounds, JudgedRounds]:
    """Rounds to fit to, to choose by and to score on, split by prompt so that no text is in two of them.
    Every second prompt is fitted to; the others alternate."""
    place = rounds.prompt % 4
    return rounds.select(place % 2 == 0), rounds.select(place == 1), rounds.select(place == 3)
