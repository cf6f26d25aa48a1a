"""What the parts of an audit found, and why each fails, if it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dspark.audit.statistics import SIMULATED
from dspark.result import GenerationResult, pooled_acceptance_length


@dataclass(frozen=True, slots=True)
class Counts:
    """What the engine says about its own work."""

    sequences: int
    tokens: int
    rounds: int
    drafted: int
    verified: int
    accepted: int
    acceptance_length: float | None
    """Pooled: all tokens committed in rounds over all rounds."""

    @classmethod
    def of(cls, results: Sequence[GenerationResult]) -> Counts:
        """Sums over results."""
        rounds = [r for result in results for r in result.rounds]
        return cls(
            sequences=len(results),
            tokens=sum(len(result.token_ids) for result in results),
            rounds=len(rounds),
            drafted=sum(r.drafted for r in rounds),
            verified=sum(r.verified for r in rounds),
            accepted=sum(r.accepted for r in rounds),
            acceptance_length=pooled_acceptance_length(results),
        )


@dataclass(frozen=True, slots=True)
class Difference:
    """A token of the engine that is not the reference's argmax."""

    sequence: int
    position: int
    """In the output, from 0."""
    token: int
    reference_token: int
    margin: float
    """Logit of the reference's token minus that of the engine's, in the reference."""
    bound: float
    """The margin up to which rounding explains it."""

    @property
    def is_rounding(self) -> bool:
        """Whether rounding explains it."""
        return self.margin <= self.bound


@dataclass(frozen=True, slots=True)
class GreedyCheck:
    """Temperature 0 against the reference, token by token."""

    counts: Counts
    differences: tuple[Difference, ...]
    smallest_gap: float
    """Between the two best logits of a row, over all tokens."""
    undecided: int
    """Tokens whose two best logits are closer than rounding: the check says nothing about these."""
    largest_bound: float
    faults: tuple[str, ...]

    @property
    def beyond_rounding(self) -> int:
        """Differences that rounding does not explain."""
        return sum(not d.is_rounding for d in self.differences)

    def failures(self) -> list[str]:
        """Why this check fails; empty if it does not."""
        found = list(self.faults)
        if self.beyond_rounding:
            first = next(d for d in self.differences if not d.is_rounding)
            found.append(
                f"temperature 0: {self.beyond_rounding} of {self.counts.tokens} tokens differ from the "
                f"reference by more than rounding, first token {first.position} of sequence "
                f"{first.sequence}: {first.token} instead of {first.reference_token}, whose logit is "
                f"{first.margin:.3g} higher (rounding explains {first.bound:.3g})"
            )
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            **asdict(self.counts),
            "equal": self.counts.tokens - len(self.differences),
            "within_rounding": len(self.differences) - self.beyond_rounding,
            "beyond_rounding": self.beyond_rounding,
            "smallest_gap": self.smallest_gap,
            "undecided": self.undecided,
            "rounding_bound": self.largest_bound,
            "differences": [asdict(d) for d in self.differences],
            "failures": self.failures(),
        }


@dataclass(frozen=True, slots=True)
class Test:
    """One statistical test of one sampled run."""

    name: str
    count: int
    statistic: float
    p_value: float
    limit: float
    """The p-value below which it fails."""
    detectable: float
    """The true value of the statistic that would have failed with probability 0.99."""

    @property
    def is_passed(self) -> bool:
        """Whether chance explains the statistic."""
        return self.p_value >= self.limit


@dataclass(frozen=True, slots=True)
class Planted:
    """The smallest fault of one kind that this run would have caught, by simulation."""

    kind: str
    share: float | None
    """Share of the tokens drawn wrongly; `None`: not even all of them would be caught."""
    total_variation: float | None
    """The same as mean total variation distance between the wrong distribution and the target's."""


@dataclass(frozen=True, slots=True)
class SampledCheck:
    """A run above temperature 0 against the reference's distributions."""

    name: str
    counts: Counts
    tests: tuple[Test, ...]
    planted: tuple[Planted, ...]
    impossible: int
    """Tokens that the target's distribution excludes."""
    faults: tuple[str, ...]

    def failures(self) -> list[str]:
        """Why this check fails; empty if it does not."""
        found = list(self.faults)
        if self.impossible:
            found.append(f"{self.name}: {self.impossible} tokens have probability 0 under the target")
        for test in self.tests:
            if not test.is_passed:
                found.append(
                    f"{self.name}: {test.name} is {test.statistic:.4f} over {test.count} numbers; chance "
                    f"gives as much with probability {test.p_value:.1e} (the test fails below "
                    f"{test.limit:.1e})"
                )
        return found

    def power(self) -> str:
        """What would have failed, in words."""
        caught = [
            f"{p.kind} by {p.total_variation:.3f}" for p in self.planted if p.total_variation is not None
        ]
        if not caught:
            return "too few tokens to catch even a distribution that is entirely wrong"
        return (
            f"distributions that are {' or '.join(caught)} in total variation fail in each of {SIMULATED} "
            "simulated audits"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "name": self.name,
            **asdict(self.counts),
            "tests": [{**asdict(test), "passed": test.is_passed} for test in self.tests],
            "would_have_caught": [asdict(planted) for planted in self.planted],
            "impossible_tokens": self.impossible,
            "failures": self.failures(),
        }


@dataclass(frozen=True, slots=True)
class CoupledCheck:
    """A text drawn under `coupled` against the one that seed, position and reference determine."""

    name: str
    equal: int
    within_rounding: int
    beyond_rounding: tuple[tuple[int, int], ...]
    """(sequence, position in the output) of each token that differs."""

    def failures(self) -> list[str]:
        """Why this check fails; empty if it does not."""
        if not self.beyond_rounding:
            return []
        sequence, position = self.beyond_rounding[0]
        return [
            f"{self.name}: {len(self.beyond_rounding)} tokens are not those that seed and position "
            f"determine; the first is token {position} of sequence {sequence}"
        ]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "failures": self.failures()}
