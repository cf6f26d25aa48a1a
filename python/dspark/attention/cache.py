"""Keys and values of one request, for every layer of one model."""

from __future__ import annotations

from copy import copy
from typing import Self

import torch
from torch import Tensor

from dspark.errors import CapacityError

FIRST_CAPACITY = 128


class KVStore:
    """One tensor `[layers, 2 * key heads, capacity, head_dim]` (keys, then values).

    Rows below `length` are committed. Rows behind it are scratch: a pass writes and attends to them, and
    `advance` decides which of them stay. So a rollback takes no work: what was rejected is overwritten.

    The capacity is what was reserved (`reserve`). Without a reservation, a store grows by doubling.
    """

    __slots__ = ("data", "kv_heads", "length", "reserved")

    def __init__(
        self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.length = 0
        self.reserved = 0
        self.kv_heads = kv_heads
        self.data = torch.empty(layers, 2 * kv_heads, 0, head_dim, dtype=dtype, device=device)

    @property
    def capacity(self) -> int:
        """Positions that fit without growing."""
        return self.data.shape[2]

    @property
    def position_bytes(self) -> int:
        """Bytes of one position."""
        layers, heads, _, head_dim = self.data.shape
        return layers * heads * head_dim * self.data.element_size()

    def reserve(self, positions: int) -> None:
        """Allocates exactly `positions` positions if there are fewer; a store never shrinks.

        From then on it does not grow on its own: a pass that needs more raises `CapacityError`.
        """
        self.reserved = positions
        if (rows := self._rows_for(positions)) > self.capacity:
            self._resize(rows)

    def require(self, end: int) -> None:
        """Makes sure that rows below `end` can be written.

        Raises:
            CapacityError: room was reserved, but less than that.
        """
        if end <= self.capacity:
            return
        if self.reserved:
            raise CapacityError(
                f"a pass needs room for {end} positions of a request, and {self.reserved} were reserved"
            )
        self._resize(max(FIRST_CAPACITY, 1 << (end - 1).bit_length()))

    def advance(self, count: int) -> None:
        """Commits the first `count` rows written behind `length`."""
        if count < 0 or self.length + count > self.capacity:
            raise CapacityError(
                f"cannot commit {count} rows at length {self.length} of a cache with room for {self.capacity}"
            )
        self.length += count

    def fork(self, length: int, room: int = 0) -> Self | None:
        """A separate store with copies of the first `length` committed rows, or of all if there are fewer.

        Args:
            room: positions to reserve for it; 0 reserves nothing.

        Returns:
            The store, whose `length` says how many rows it took, or None if there is nothing to take.
        """
        rows = min(length, self.length)
        return self._copied(rows, room) if rows > 0 else None

    def _copied(self, rows: int, room: int) -> Self:
        forked = copy(self)
        forked.length, forked.reserved = rows, room
        forked._resize(max(rows, forked._rows_for(room)) if room else rows)
        return forked

    def _rows_for(self, positions: int) -> int:
        """Rows that a request of `positions` positions needs."""
        return positions

    def _resize(self, capacity: int) -> None:
        layers, heads, _, head_dim = self.data.shape
        resized = self.data.new_empty(layers, heads, capacity, head_dim)
        resized[:, :, : self.length] = self.data[:, :, : self.length]
        self.data = resized

    def layers(self, start: int, end: int) -> tuple[Tensor, ...]:
        """Views `[2 * key heads, end - start, head_dim]` of every layer, to write to."""
        return self.data[:, :, start:end].unbind(0)

    def keys(self, end: int) -> tuple[Tensor, ...]:
        """Views of the keys below `end`, `[key heads, end, head_dim]`, of every layer."""
        return self.data[:, : self.kv_heads, :end].unbind(0)

    def values(self, end: int) -> tuple[Tensor, ...]:
        """Views of the values below `end`, `[key heads, end, head_dim]`, of every layer."""
        return self.data[:, self.kv_heads :, :end].unbind(0)
