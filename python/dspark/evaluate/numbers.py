"""The numbers of one way of decoding on one data set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dspark.calibrate.rounds import judged_positions
from dspark.evaluate.answers import Answer, Estimate, Sums, by_prompt, ratio
from dspark.result import Round


@dataclass(frozen=True, slots=True)
class Position:
    """What became of the tokens drafted at one position."""

    reached: int
    """Rounds that verified it after an accepted prefix."""
    accepted: int
    rate: Estimate | None
    """Share of those reached that were accepted."""
    survival: Estimate | None
    """Share of the rounds that verified it in which it was kept."""

    def to_json(self) -> dict[str, Any]:
        """Plain numbers."""
        return {name: _shown(getattr(self, name)) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Numbers:
    """Acceptance and speed over a list of answers."""

    answers: int
    tokens: int
    rounds: int
    rounds_without_draft: int
    """Rounds in which nothing was drafted: the policy left the draft out, a lookup found nothing, or there
    was room for one more token."""
    acceptance_length_pooled: Estimate | None
    """All tokens committed in rounds over all rounds."""
    acceptance_length_mean_of_requests: Estimate | None
    """The mean of the answers' own means."""
    verified_per_round: Estimate | None
    """Drafted tokens that the target checked, over all rounds."""
    verify_rate: Estimate | None
    """The same over the tokens of a whole block."""
    acceptance_rate: Estimate | None
    """Share of the checked tokens that were kept; tokens drafted beyond the end of a text are left out."""
    positions: tuple[Position, ...]
    tokens_per_second: Estimate | None
    over_plain: Estimate | None
    """Tokens per second over those of plain decoding on the same prompts."""

    @property
    def share_without_draft(self) -> float | None:
        """Share of the rounds in which nothing was drafted."""
        return self.rounds_without_draft / self.rounds if self.rounds else None

    def to_json(self) -> dict[str, Any]:
        """Plain numbers."""
        plain = {name: _shown(getattr(self, name)) for name in self.__slots__ if name != "positions"}
        return {**plain, "acceptance_by_position": [p.to_json() for p in self.positions]}


@dataclass(frozen=True, slots=True)
class Measured:
    """One way of decoding on one data set. Looping answers flatter drafters, so the others are also measured
    alone."""

    every: Numbers
    looping: float
    """Share of answers that loop."""
    without_looping: Numbers | None
    """Of the answers that do not loop; `over_plain` only where plain decoding's own does not loop either.
    `None` if all loop."""
    of_looping: Numbers | None

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, with those over all answers at the top level."""
        parts = {"without_looping": self.without_looping, "of_looping": self.of_looping}
        shown = {name: None if part is None else part.to_json() for name, part in parts.items()}
        return {**self.every.to_json(), "looping": self.looping, **shown}


def measure(answers: Sequence[Answer], plain: Sequence[Answer], block_size: int) -> Measured:
    """The numbers of these answers; `plain` are plain decoding's to the same requests, in the same order."""
    pairs = list(zip(answers, plain, strict=True))
    straight = [a for a in answers if not a.looping]
    circling = [a for a in answers if a.looping]
    compared = [(a, p) for a, p in pairs if not (a.looping or p.looping)]
    return Measured(
        numbers(answers, pairs, block_size),
        len(circling) / len(answers),
        numbers(straight, compared, block_size) if straight else None,
        numbers(circling, [(a, p) for a, p in pairs if a.looping], block_size) if circling else None,
    )


def numbers(answers: Sequence[Answer], pairs: Sequence[tuple[Answer, Answer]], block_size: int) -> Numbers:
    """The numbers of these answers; `pairs` are answers beside those of plain decoding."""
    rounds = [r for answer in answers for r in answer.rounds]
    return Numbers(
        answers=len(answers),
        tokens=sum(answer.tokens for answer in answers),
        rounds=len(rounds),
        rounds_without_draft=sum(r.drafted == 0 for r in rounds),
        acceptance_length_pooled=_over_rounds(answers, lambda r: r.committed),
        acceptance_length_mean_of_requests=_mean_of_requests(answers),
        verified_per_round=_over_rounds(answers, lambda r: r.verified),
        verify_rate=_over_rounds(answers, lambda r: r.verified, lambda _: block_size),
        acceptance_rate=_over_rounds(answers, lambda r: r.accepted, judged_positions),
        positions=tuple(_position(answers, k) for k in range(block_size))
        if any(r.verified for r in rounds)
        else (),
        tokens_per_second=_speed(answers),
        over_plain=_over_plain(pairs),
    )


def _prompts(answers: Sequence[Answer]) -> list[int]:
    return sorted({answer.prompt for answer in answers})


def _over_rounds(
    answers: Sequence[Answer], above: Callable[[Round], int], below: Callable[[Round], int] = lambda _: 1
) -> Estimate | None:
    """A sum over all rounds, divided by another one (by default the number of rounds)."""

    def sums(what: Callable[[Round], int]) -> Sums:
        return by_prompt(answers, _prompts(answers), lambda answer: sum(map(what, answer.rounds)))

    return ratio([sums(above)], [sums(below)])


def _mean_of_requests(answers: Sequence[Answer]) -> Estimate | None:
    drafting = [answer for answer in answers if answer.rounds]
    prompts = _prompts(drafting)
    means = by_prompt(drafting, prompts, lambda a: sum(r.committed for r in a.rounds) / len(a.rounds))
    return ratio([means], [by_prompt(drafting, prompts, lambda _: 1)])


def _speed(*sides: Sequence[Answer]) -> Estimate | None:
    """Tokens per second of one side, or its ratio to that of a second side on the same prompts."""
    prompts = _prompts(sides[0])
    tokens = [by_prompt(side, prompts, lambda answer: answer.tokens) for side in sides]
    return ratio(tokens, [by_prompt(side, prompts, lambda answer: answer.seconds or 0.0) for side in sides])


def _over_plain(pairs: Sequence[tuple[Answer, Answer]]) -> Estimate | None:
    if all(answer is plain for answer, plain in pairs):
        return None  # plain decoding itself, or nothing to compare
    return _speed([answer for answer, _ in pairs], [plain for _, plain in pairs])


def _position(answers: Sequence[Answer], k: int) -> Position:
    def judged(r: Round) -> bool:
        return judged_positions(r) > k

    def reached(r: Round) -> bool:
        return judged(r) and r.accepted >= k

    def kept(r: Round) -> bool:
        return judged(r) and r.accepted > k

    rounds = [r for answer in answers for r in answer.rounds]
    return Position(
        sum(map(reached, rounds)),
        sum(map(kept, rounds)),
        _over_rounds(answers, kept, reached),
        _over_rounds(answers, kept, judged),
    )


def _shown(value: Any) -> Any:
    return value.to_json() if isinstance(value, Estimate) else value
