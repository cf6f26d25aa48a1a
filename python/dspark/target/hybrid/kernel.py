"""The linear layers of one pass by our kernels: a launch for each layer, and one for each commit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dspark import _core
from dspark.kernels import stream
from dspark.target.hybrid.config import DeltaSizes
from dspark.target.hybrid.mixer import DeltaWeights

if TYPE_CHECKING:
    from dspark.target.hybrid.cache import HybridCache


class DeltaKernelPass:
    """Requests with few rows each, or none. What a commit needs is stored for every layer: the convolution's
    inputs, unit keys, log decays and updates of the rows."""

    __slots__ = ("_batch", "_device", "_firsts", "_kernel", "_layers", "_tensors", "_values")

    def __init__(
        self,
        kernel: _core.KernelDelta,
        segments: Sequence[tuple[HybridCache, int]],
        sizes: DeltaSizes,
        dtype: torch.dtype,
    ) -> None:
        like = segments[0][0].state
        layers, device = like.shape[0], like.device
        table: list[tuple[int, int, int, int]] = []
        rows = 0
        for number, (cache, count) in enumerate(segments):
            table.append((cache.state.data_ptr(), cache.conv.data_ptr(), rows, count))
            rows += count
            cache.offer(self, number, count)
        self._tensors = (
            torch.tensor(table, dtype=torch.int64, device=device),
            torch.empty(layers, rows, sizes.channels, dtype=dtype, device=device),
            like.new_empty(layers, rows, sizes.key_heads, sizes.key_dim),
            like.new_empty(layers, rows, sizes.value_heads),
            like.new_empty(layers, rows, sizes.values),
        )
        requests, inputs, keys, log_decays, updates = (tensor.data_ptr() for tensor in self._tensors)
        most = max(count for _, count in segments)
        self._batch = (len(table), most, rows, requests, inputs, keys, log_decays, updates)
        self._kernel, self._values, self._layers, self._device = kernel, sizes.values, layers, device
        self._firsts = [first for _, _, first, _ in table]

    def layer(self, index: int, mixed: Tensor, weights: DeltaWeights) -> Tensor:
        """See `LayersOfPass.layer`."""
        mixed = mixed.contiguous()
        out = mixed.new_empty(len(mixed), self._values)
        places = mixed.data_ptr(), out.data_ptr()
        self._kernel.rows(self._batch, weights.addresses, index, *places, stream(self._device))
        return out

    def commit(self, index: int, count: int, conv: Tensor, state: Tensor) -> None:
        """Applies the first `count` rows of request `index` to its states."""
        rows, places = (self._firsts[index], count), (conv.data_ptr(), state.data_ptr())
        self._kernel.carry(self._batch, self._layers, *rows, *places, stream(self._device))
