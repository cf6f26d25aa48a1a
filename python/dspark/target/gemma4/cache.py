"""The cache of one request: full layers keep every position, sliding layers what their window reaches."""

from __future__ import annotations

from typing import Self

import torch

from dspark.attention.cache import KVStore


class SlidingStore(KVStore):
    """Keys and values of sliding layers. `length` counts the rows held, not the positions seen.

    Rows are only ever forgotten in front of the committed window, before a pass, so whatever part of the
    pass is kept afterwards finds everything that it sees.
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
        """Before a pass of `rows` rows: forgets what no later row sees, where that saves growing, and grows
        for a pass that is wider than what is left.

        The next row sees itself and `window - 1` rows before it. They move only once as many rows lie in
        front of them, so that a row is copied about once for each window that passes.
        """
        seen = self.window - 1
        if self.length + rows > self.capacity and self.length >= 2 * seen and self.length > seen:
            self.data[:, :, :seen] = self.data[:, :, self.length - seen : self.length]
            self.forgotten += self.length - seen
            self.length = seen
        if self.reserved and self.length + rows > self.capacity:
            self._resize(self.length + rows)

    def fork(self, length: int, room: int = 0) -> Self | None:
        """See `KVStore.fork`; None too where a row behind `length` positions would see forgotten ones."""
        rows = length - self.forgotten
        if self.forgotten and rows < self.window - 1:
            return None
        return super().fork(rows, room)

    def _rows_for(self, positions: int) -> int:
        """Two windows and what is to come, up to a third window: then `make_room` finds enough to forget, but
        for a pass wider than that."""
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
        """Those of full layers: sliding ones forget."""
        full = (store for store in self.stores.values() if not isinstance(store, SlidingStore))
        return sum(store.position_bytes for store in full)

    @property
    def state_bytes(self) -> int:
        """None. What sliding layers hold, three windows at most, is not counted."""
        return 0

    def reserve(self, positions: int) -> None:
        """Room for `positions` positions: all of them in full layers, a window's in sliding ones."""
        for store in self.stores.values():
            store.reserve(positions)

    def mark(self) -> None:
        """Nothing to remember: what can be forked at is what is held."""

    def fork(self, length: int, room: int = 0) -> Self | None:
        """See `TargetCache.fork`; None too at a length whose window is no longer held."""
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
        """Before a pass of `rows` rows."""
        for store in self.stores.values():
            if isinstance(store, SlidingStore):
                store.make_room(rows)

    def advance(self, count: int) -> None:
        """Commits the first `count` rows of the last pass."""
        for store in self.stores.values():
            store.advance(count)
        self.length += count
