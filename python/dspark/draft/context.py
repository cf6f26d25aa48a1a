"""The draft's cache of one request."""

from __future__ import annotations

import torch

from dspark.attention.cache import KVStore


class DraftContext(KVStore):
    """Context keys and values of every draft layer: one row per committed token, from the target's taps.

    A block's own keys and values are written behind `length` and never kept. They are not positions of the
    request, and a block is always computed whole, however little of it the request can still use. So a
    context has room for one block in addition to what is reserved for it.
    """

    __slots__ = ("block_size",)

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        block_size: int,
    ) -> None:
        super().__init__(layers, kv_heads, head_dim, dtype, device)
        self.block_size = block_size

    def _rows_for(self, positions: int) -> int:
        return positions + self.block_size
