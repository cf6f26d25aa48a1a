"""Keys and values of one request, for every layer of one model."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.errors import CapacityError

FIRST_CAPACITY = 128


class KVStore:
    """One tensor `[layers, 2 * key heads, capacity, head_dim]` (keys, then values), grown by doubling.

    Rows below `length` are committed. Rows behind it are scratch: a pass writes there and attends to them,
    and whether they stay is decided by `advance`. So a rollback is nothing at all: what was rejected is
    overwritten.
    """

    __slots__ = ("data", "kv_heads", "length")

    def __init__(
        self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.length = 0
        self.kv_heads = kv_heads
        self.data = torch.empty(layers, 2 * kv_heads, FIRST_CAPACITY, head_dim, dtype=dtype, device=device)

    @property
    def capacity(self) -> int:
        """Positions that fit without growing."""
        return self.data.shape[2]

    def reserve(self, end: int) -> None:
        """Makes room for positions below `end`; committed rows are kept."""
        if end <= self.capacity:
            return
        layers, heads, _, head_dim = self.data.shape
        grown = self.data.new_empty(layers, heads, 1 << (end - 1).bit_length(), head_dim)
        grown[:, :, : self.length] = self.data[:, :, : self.length]
        self.data = grown

    def advance(self, count: int) -> None:
        """Commits the first `count` rows written behind `length`."""
        if count < 0 or self.length + count > self.capacity:
            raise CapacityError(
                f"cannot commit {count} rows at length {self.length} of a cache with room for {self.capacity}"
            )
        self.length += count

    def layers(self, start: int, end: int) -> tuple[Tensor, ...]:
        """Views `[2 * key heads, end - start, head_dim]` of every layer, to write to."""
        return self.data[:, :, start:end].unbind(0)

    def keys_t(self, end: int) -> tuple[Tensor, ...]:
        """Views of the transposed keys below `end`, `[key heads, head_dim, end]`, of every layer."""
        return self.data[:, : self.kv_heads, :end].transpose(2, 3).unbind(0)

    def values(self, end: int) -> tuple[Tensor, ...]:
        """Views of the values below `end`, `[key heads, end, head_dim]`, of every layer."""
        return self.data[:, self.kv_heads :, :end].unbind(0)
