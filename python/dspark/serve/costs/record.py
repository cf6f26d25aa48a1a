"""What a measurement found, as numbers, as JSON and as the table that the planner reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from dspark import _core


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of the parts of a round, each the shortest of a few runs: other load can only add time."""

    passes: tuple[tuple[int, int, float], ...]
    """Of the target: (tokens over all requests, requests, seconds)."""
    draft: tuple[tuple[int, float], ...]
    """Of the draft's pass and of the feed of its context: (drafting requests, seconds)."""
    token_seconds: float
    """Of the Markov chain, per drafted token."""
    widest: int
    """Tokens of the widest pass that was asked for; a measurement that ran out of time stops before it."""
    context: int
    """Positions in each request's caches."""
    repeats: int
    """The most timed runs of a point."""
    seconds: float
    """How long measuring took."""

    def table(self) -> _core.CostTable:
        """The table: a curve rising with tokens, what each further request adds, and what drafting costs."""
        return _core.CostTable.fit(
            self.passes,
            draft=self.draft,
            token_seconds=self.token_seconds,
        )

    def to_json(self) -> dict[str, Any]:
        """For `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """The same record; raises `ValueError`, `TypeError` or `KeyError` for anything else."""
        numbers = {name: float(value[name]) for name in ("token_seconds", "seconds")}
        costs = cls(
            passes=tuple((_count(t), _count(r), float(s)) for t, r, s in value["passes"]),
            draft=tuple((_count(r), float(s)) for r, s in value["draft"]),
            widest=_count(value["widest"]),
            context=_count(value["context"]),
            repeats=_count(value["repeats"]),
            **numbers,
        )
        times = [*numbers.values(), *(s for *_, s in costs.passes), *(s for _, s in costs.draft)]
        if not costs.passes or not costs.draft or not all(math.isfinite(t) and t >= 0 for t in times):
            raise ValueError("a time is missing, negative or not finite")
        costs.table()  # what the core refuses is as useless as what cannot be read
        return costs


def _count(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"expected a whole number of at least 1, found {value!r}")
    return value
