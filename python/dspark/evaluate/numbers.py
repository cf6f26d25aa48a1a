"""The numbers of one way of decoding on one data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dspark.evaluate.answers import Answer, Estimate, by_prompt, ratio


@dataclass(frozen=True, slots=True)
class Position:
    """What became of the tokens drafted at one position."""

    reached: int
    """Rounds that verified it after an accepted prefix."""
    accepted: int
    survival: float | None
    """Share of the rounds that verified it in which it was kept."""

    @property
    def rate(self) -> float | None:
        """Share of the reached that were accepted."""
        return self.accepted / self.reached if self.reached else None

    def to_json(self) -> dict[str, Any]:
        """Plain numbers."""
        return {
            "reached": self.reached,
            "accepted": self.accepted,
            "rate": self.rate,
            "survival": self.survival,
        }


@dataclass(frozen=True, slots=True)
class Numbers:
    """Acceptance and speed over a list of answers."""

    answers: int
    tokens: int
    acceptance_length_pooled: Estimate | None
    """All tokens committed in rounds over all rounds."""
    acceptance_length_mean_of_requests: Estimate | None
    """The mean of the answers' own means."""
    verify_rate: float | None
    """Share of the drafted tokens that the target checked."""
    acceptance_rate: float | None
    """Share of the checked tokens that were kept."""
    positions: tuple[Position, ...]
    tokens_per_second: Estimate | None
    over_plain: Estimate | None
    """Tokens per second over those of plain decoding on the same prompts."""
    looping: float
    """Share of answers that go round in circles."""
    pooled_without_looping: Estimate | None
    pooled_of_looping: Estimate | None

    def to_json(self) -> dict[str, Any]:
        """Plain numbers."""

        def shown(value: Any) -> Any:
            return value.to_json() if isinstance(value, Estimate) else value

        plain = {name: shown(getattr(self, name)) for name in self.__slots__ if name != "positions"}
        return {**plain, "acceptance_by_position": [p.to_json() for p in self.positions]}


def numbers(answers: Sequence[Answer], plain: Sequence[Answer], gamma: int) -> Numbers:
    """The numbers of these answers; `plain` are plain decoding's answers to the same prompts."""
    rounds = [r for answer in answers for r in answer.rounds]
    drafted, verified = sum(r.drafted for r in rounds), sum(r.verified for r in rounds)
    return Numbers(
        answers=len(answers),
        tokens=sum(answer.tokens for answer in answers),
        acceptance_length_pooled=_pooled(answers),
        acceptance_length_mean_of_requests=_mean_of_requests(answers),
        verify_rate=verified / drafted if drafted else None,
        acceptance_rate=sum(r.accepted for r in rounds) / verified if verified else None,
        positions=tuple(_position(answers, k) for k in range(gamma)) if drafted else (),
        tokens_per_second=_speed(answers),
        over_plain=None if answers is plain else _speed(answers, plain),
        looping=sum(answer.looping for answer in answers) / len(answers),
        pooled_without_looping=_pooled([answer for answer in answers if not answer.looping]),
        pooled_of_looping=_pooled([answer for answer in answers if answer.looping]),
    )


def _prompts(answers: Sequence[Answer]) -> list[int]:
    return sorted({answer.prompt for answer in answers})


def _pooled(answers: Sequence[Answer]) -> Estimate | None:
    prompts = _prompts(answers)
    committed = by_prompt(answers, prompts, lambda answer: sum(r.committed for r in answer.rounds))
    return ratio([committed], [by_prompt(answers, prompts, lambda answer: len(answer.rounds))])


def _mean_of_requests(answers: Sequence[Answer]) -> Estimate | None:
    drafting = [answer for answer in answers if answer.rounds]
    prompts = _prompts(drafting)
    means = by_prompt(drafting, prompts, lambda a: sum(r.committed for r in a.rounds) / len(a.rounds))
    return ratio([means], [by_prompt(drafting, prompts, lambda _: 1)])


def _speed(answers: Sequence[Answer], base: Sequence[Answer] | None = None) -> Estimate | None:
    above, below = [], []
    prompts = _prompts(answers)
    for side in (answers, base):
        if side is not None:
            above.append(by_prompt(side, prompts, lambda answer: answer.tokens))
            below.append(by_prompt(side, prompts, lambda answer: answer.seconds or 0.0))
    return ratio(above, below)


def _position(answers: Sequence[Answer], k: int) -> Position:
    # A round that ended its text at an accepted token says nothing about what was drafted behind it.
    judged = [
        r
        for answer in answers
        for r in answer.rounds
        if (r.verified if r.committed > r.accepted else r.accepted) > k
    ]
    kept = sum(r.accepted > k for r in judged)
    return Position(sum(r.accepted >= k for r in judged), kept, kept / len(judged) if judged else None)
