"""What an audit found, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dspark.result import GenerationResult, pooled_acceptance_length

Verdict = Literal["pass", "fail", "inconclusive"]


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
    """Tokens whose two best logits are closer than rounding: there the check can tell nothing."""
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
                f"temperature 0: {self.beyond_rounding} of {self.counts.tokens} tokens not the reference's: "
                f"token {first.position} of sequence {first.sequence}: {first.token} instead of "
                f"{first.reference_token}, {first.margin:.3g} below it (rounding explains {first.bound:.3g})"
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
    """The same as mean total variation distance between the wrong law and the target's."""


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
                    f"{self.name}: {test.name} is {test.statistic:.4f} over {test.count} numbers, by chance "
                    f"with probability {test.p_value:.1e} (fails below {test.limit:.1e})"
                )
        return found

    def power(self) -> str:
        """What would have failed, in words."""
        caught = [
            f"{p.kind} by {p.total_variation:.3f}" for p in self.planted if p.total_variation is not None
        ]
        if not caught:
            return "too few to catch even a law that is wholly wrong"
        return f"laws {' or '.join(caught)} in total variation fail in each of 100 simulated audits"

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
class Report:
    """The whole audit."""

    info: dict[str, Any]
    greedy: GreedyCheck
    sampled: tuple[SampledCheck, ...]

    def failures(self) -> list[str]:
        """Everything that speaks against losslessness."""
        return [*self.greedy.failures(), *(line for check in self.sampled for line in check.failures())]

    def gaps(self) -> list[str]:
        """Runs that prove nothing about speculation, since nothing was drafted or nothing accepted in
        them."""
        runs: Iterable[tuple[str, Counts]] = [
            ("temperature 0", self.greedy.counts),
            *((check.name, check.counts) for check in self.sampled),
        ]
        found = []
        for name, counts in runs:
            if counts.drafted == 0:
                found.append(f"{name}: nothing was drafted")
            elif counts.accepted == 0:
                found.append(f"{name}: none of {counts.drafted} drafted tokens was accepted")
        return found

    @property
    def verdict(self) -> Verdict:
        """A failure outweighs a gap, and a gap a pass."""
        if self.failures():
            return "fail"
        return "inconclusive" if self.gaps() else "pass"

    def shown(self) -> list[str]:
        """What the audit shows, in words."""
        lines = []
        if not self.greedy.failures():
            decided = self.greedy.counts.tokens - self.greedy.undecided
            lines.append(
                f"temperature 0: each of {decided} tokens that rounding leaves decided is what a plain pass "
                "over the whole text before it gives"
            )
        for check in self.sampled:
            if not check.failures():
                tokens = check.counts.tokens
                lines.append(
                    f"{check.name}: {tokens} tokens follow the target's distributions; {check.power()}"
                )
        return lines

    @staticmethod
    def not_shown() -> list[str]:
        """What no audit of this kind shows."""
        return [
            "that the target is computed rightly: engine and reference share its weights and layers",
            "biases smaller than those named, or that leave both orders uniform and neighbours uncorrelated",
            "prompts, lengths and sampling parameters that were not run (penalties, min-p, biases, stops)",
        ]

    def to_json(self) -> dict[str, Any]:
        """What `dspark audit --json` prints."""
        return {
            "verdict": self.verdict,
            "failures": self.failures(),
            "inconclusive": self.gaps(),
            "greedy": self.greedy.to_json(),
            "sampled": [check.to_json() for check in self.sampled],
            "shown": self.shown(),
            "not_shown": self.not_shown(),
            "info": self.info,
        }
