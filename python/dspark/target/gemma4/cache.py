"""The cache of one request: full layers keep every position, sliding layers what their window reaches."""

from __future__ import annotations

from typing import Self

import torch

from dspark.attention.cache import KVStore


class SlidingStore(KVStore):
    """Keys and values of sliding layers. `length` counts the rows held, not the positions seen.

    Rows are forgotten only in front of the committed window and only before a pass, so whatever part of the
    pass is kept, everything that its rows see is still there.
    """

    __slots__ = ("forgotten", "window")

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        window: int,
    ) -> None:
        super().__init__(layers, kv_heads, head_dim, dtype, device)
        self.window = window
        self.forgotten = 0

    def make_room(self, rows: int) -> None:
        """Prepares a pass of `rows` rows: forgets what no later row sees if that avoids growing, and grows if
        the pass does not fit even so.

        The next row sees itself and the `window - 1` rows before it. These are moved to the front only once
        at least as many rows lie before them, so that a row is copied about once for each window that passes.
        """
        seen = self.window - 1
        if self.length + rows > self.capacity and self.length >= 2 * seen and self.length > seen:
            self.data[:, :, :seen] = self.data[:, :, self.length - seen : self.length]
            self.forgotten += self.length - seen
            self.length = seen
        if self.reserved and self.length + rows > self.capacity:
            self._resize(self.length + rows)

    def fork(self, length: int, room: int = 0) -> Self | None:
        """See `KVStore.fork`; also None where a row after `length` positions would see forgotten ones."""
        rows = length - self.forgotten
        if self.forgotten and rows < self.window - 1:
            return None
        return super().fork(rows, room)

    def _rows_for(self, positions: int) -> int:
        """Two windows, and what is still to come up to a third: then `make_room` always finds enough to
        forget, except for a pass wider than that."""
        seen = self.window - 1
        to_come = positions - self.forgotten - self.length
        return min(to_come, max(seen, 1)) + min(self.length, 2 * seen)


class Gemma4Cache:
    """Committed positions, and a store for each kind of layer that the model has."""

    __slots__ = ("length", "stores")

    def __init__(self, stores: dict[str, KVStore]) -> None:
        self.length = 0
        self.stores = stores

    @property
    def position_bytes(self) -> int:
        """Bytes of the full layers: sliding ones forget positions."""
        full = (store for store in self.stores.values() if not isinstance(store, SlidingStore))
        return sum(store.position_bytes for store in full)

    @property
    def state_bytes(self) -> int:
        """Zero: what sliding layers hold, three windows at most, is not counted."""
        return 0

    def reserve(self, positions: int) -> None:
        """Makes room for `positions` positions: all in full layers, three windows at most in sliding ones."""
        for store in self.stores.values():
            store.reserve(positions)

    def mark(self) -> None:
        """Does nothing: the cache can be forked at any length whose window is still held."""

    def fork(self, length: int, room: int = 0) -> Self | None:
        """See `TargetCache.fork`; also None at a length whose window is no longer held."""
        stores: dict[str, KVStore] = {}
        # Sliding layers first: only they may refuse.
        for kind, store in sorted(self.stores.items(), key=lambda item: type(item[1]) is KVStore):
            forked = store.fork(min(length, self.length), room)
            if forked is None:
                return None
            stores[kind] = forked
        cache = type(self)(stores)
        cache.length = min(length, self.length)
        return cache

    def make_room(self, rows: int) -> None:
        """Prepares the sliding layers for a pass of `rows` rows."""
        for store in self.stores.values():
            if isinstance(store, SlidingStore):
                store.make_room(rows)

    def advance(self, count: int) -> None:
        """Commits the first `count` rows of the last pass."""
        for store in self.stores.values():
            store.advance(count)
        self.length += count
