"""The linear layers of one pass by our kernels: one launch per layer, one per commit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dspark.kernels import stream
from dspark.target.hybrid.config import DeltaSizes
from dspark.target.hybrid.mixer import DeltaWeights

if TYPE_CHECKING:
    from dspark._core import Kernels
    from dspark.target.hybrid.cache import HybridCache

MOST_ROWS = 16
"""Rows of a request that a launch takes."""


class KernelPass:
    """Requests with up to `MOST_ROWS` rows each, or none. What `HybridCache.advance` needs is kept for every
    layer: convolution inputs, unit keys, log decays and updates of the rows."""

    __slots__ = ("_batch", "_device", "_dtype", "_firsts", "_kept", "_kernels", "_layers", "_sizes", "_values")

    def __init__(
        self,
        kernels: Kernels,
        segments: Sequence[tuple[HybridCache, int]],
        sizes: DeltaSizes,
        dtype: torch.dtype,
    ) -> None:
        like = segments[0][0].state
        layers, device = like.shape[0], like.device
        table: list[int] = []
        firsts: list[int] = []
        rows = 0
        for number, (cache, count) in enumerate(segments):
            table += (cache.state.data_ptr(), cache.conv.data_ptr(), rows, count)
            firsts.append(rows)
            rows += count
            cache.offer(self, number, count)
        requests = torch.tensor(table, dtype=torch.int64, device=device)
        inputs = torch.empty(layers, rows, sizes.channels, dtype=dtype, device=device)
        keys = like.new_empty(layers, rows, sizes.key_heads * sizes.key_dim)
        log_decays = like.new_empty(layers, rows, sizes.value_heads)
        updates = like.new_empty(layers, rows, sizes.values)
        self._kept = (requests, inputs, keys, log_decays, updates)
        places = tuple(tensor.data_ptr() for tensor in self._kept)
        self._batch = (len(table) // 4, max(count for _, count in segments), rows, *places)
        self._kernels, self._sizes, self._values = kernels, kernel_sizes(sizes), sizes.values
        self._dtype, self._device, self._layers, self._firsts = dtype_name(dtype), device, layers, firsts

    def layer(self, index: int, mixed: Tensor, weights: DeltaWeights) -> Tensor:
        """See `LayersOfPass.layer`."""
        mixed = mixed.contiguous()
        out = mixed.new_empty(len(mixed), self._values)
        self._kernels.delta_rows(
            stream(self._device),
            self._dtype,
            self._sizes,
            self._batch,
            weights.addresses,
            index,
            mixed.data_ptr(),
            out.data_ptr(),
        )
        return out

    def commit(self, index: int, count: int, conv: Tensor, state: Tensor) -> None:
        """Takes the first `count` rows of request `index` into its states."""
        self._kernels.delta_carry(
            stream(self._device),
            self._dtype,
            self._sizes,
            self._batch,
            self._layers,
            self._firsts[index],
            count,
            conv.data_ptr(),
            state.data_ptr(),
        )


def kernel_sizes(sizes: DeltaSizes) -> tuple[int, int, int, int, int]:
    """As the binding takes them."""
    return (sizes.key_heads, sizes.groups, sizes.key_dim, sizes.value_dim, sizes.kernel)


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" and so on."""
    return str(dtype).removeprefix("torch.")
