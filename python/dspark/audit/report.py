"""The whole audit: what speaks against losslessness, what was shown, and the verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from dspark.audit.checks import Counts, CoupledCheck, GreedyCheck, SampledCheck

Verdict = Literal["pass", "fail", "inconclusive"]


@dataclass(frozen=True, slots=True)
class Report:
    """The whole audit."""

    info: dict[str, Any]
    greedy: GreedyCheck
    sampled: tuple[SampledCheck, ...]
    coupled: tuple[CoupledCheck, ...]
    """Only under the rule `coupled`: one for each sampled run."""

    def failures(self) -> list[str]:
        """Everything that speaks against losslessness."""
        checks: list[GreedyCheck | SampledCheck | CoupledCheck] = [self.greedy, *self.sampled, *self.coupled]
        return [line for check in checks for line in check.failures()]

    def gaps(self) -> list[str]:
        """Runs that prove nothing about speculation: nothing was drafted, accepted or tested in them."""
        runs: list[tuple[str, Counts]] = [
            ("temperature 0", self.greedy.counts),
            *((check.name, check.counts) for check in self.sampled),
        ]
        found = []
        for name, counts in runs:
            if counts.drafted == 0:
                found.append(f"{name}: nothing was drafted")
            elif counts.accepted == 0:
                found.append(f"{name}: none of {counts.drafted} drafted tokens was accepted")
        for check in self.sampled:
            if not check.tests:
                found.append(f"{check.name}: {check.counts.tokens} tokens are too few to test")
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
                f"temperature 0: each of the {decided} tokens that are not too close to call is what a plain "
                "pass over the whole text before it gives"
            )
        for check in self.sampled:
            if check.tests and not check.failures():
                tokens = check.counts.tokens
                lines.append(
                    f"{check.name}: {tokens} tokens follow the target's distributions; {check.power()}"
                )
        for text in self.coupled:
            if not text.failures():
                lines.append(
                    f"{text.name}: {text.equal} tokens are exactly those that seed, position and target "
                    f"determine, {text.within_rounding} more differ only by rounding"
                )
        return lines

    @staticmethod
    def not_shown() -> list[str]:
        """What no audit of this kind shows."""
        return [
            "that the target is computed correctly: engine and reference share its weights and layers",
            "biases smaller than those named, or that show neither in the two orders nor between neighbours",
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
            "coupled": [check.to_json() for check in self.coupled],
            "shown": self.shown(),
            "not_shown": self.not_shown(),
            "info": self.info,
        }
