"""The cache of one request of an adapted target."""

from __future__ import annotations

from typing import Any, Self

from dspark.errors import CapacityError, ConfigError
from dspark.target.adapter import states


class AdaptedCache:
    """A cache of transformers in which every layer keeps every position, and how much of it is committed.

    A pass appends its rows; `advance` cuts what is not kept. Layers with a sliding window keep all positions
    too (their mask applies the window), since a ring buffer could not restore what rejected tokens overwrote.
    """

    __slots__ = ("forks", "length", "pending", "position_bytes", "states")

    def __init__(self, states: Any, *, forks: bool = True, position_bytes: int = 0) -> None:
        """`forks`: whether copies of `states` were found to be exact. `position_bytes`: the bytes that one
        position was found to take; 0 before that is known."""
        self.states = states
        self.forks = forks
        self.position_bytes = position_bytes
        self.length = 0
        self.pending = 0

    @property
    def state_bytes(self) -> int:
        """Zero: every layer keeps positions."""
        return 0

    def reserve(self, positions: int) -> None:
        """Does nothing: transformers allocates memory for the rows that it appends, and for no others."""

    def mark(self) -> None:
        """Does nothing: the cache can be forked at any length."""

    def fork(self, length: int, room: int = 0) -> Self | None:
        """See `TargetCache.fork`; also None where copies are not exact."""
        rows = min(length, self.length)
        if rows <= 0 or not self.forks:
            return None
        forked = type(self)(states.copied(self.states, rows), position_bytes=self.position_bytes)
        forked.length = rows
        forked._verify(rows)
        return forked

    def begin(self) -> None:
        """Prepares a pass: forgets uncommitted rows, including those of a pass that failed half-way."""
        if self.pending:
            self._cut()
        self.pending = -1  # until the pass is through, the number of rows is unknown

    def wrote(self, count: int) -> None:
        """Records a pass of `count` rows; raises `ConfigError` unless every layer gained exactly these."""
        self.pending = count
        self._verify(self.length + count)

    def advance(self, count: int) -> None:
        """Keeps the first `count` rows of the last pass and forgets the others."""
        if not 0 <= count <= self.pending:
            raise CapacityError(
                f"cannot commit {count} rows at length {self.length}: the last pass has {self.pending} left"
            )
        self.length += count
        self._cut()

    def _cut(self) -> None:
        states.truncate(self.states, self.length)
        self.pending = 0
        self._verify(self.length)

    def _verify(self, length: int) -> None:
        if (fault := states.fault(self.states, length)) is not None:
            raise ConfigError(f"the cache {type(self.states).__name__} {fault}: it cannot be rolled back")
