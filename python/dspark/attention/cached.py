"""The attention of one pass: packed rows of several requests, each with its own cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dspark import _core
from dspark.attention.cache import KVStore
from dspark.attention.functional import ROWS_AT_ONCE, attend
from dspark.attention.kernel import AttentionPass, suits_kernel
from dspark.attention.visible import Visible
from dspark.attention.workers import parallel_region

if TYPE_CHECKING:
    from dspark.attention.choice import AttentionKernel

FEW_ROWS = 17
"""Rows of a request up to which the core's attention is used: 16 drafted tokens and their
anchor, or a draft block."""

_CORE_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_CORE_LANES = 16


class _Part:
    """One request's rows: views into its cache, for every layer, and the masks that the layers share."""

    __slots__ = ("keys", "start", "stop", "values", "visible", "write")

    def __init__(self, store: KVStore, start: int, rows: int, seen: dict[int | None, Visible]) -> None:
        end = store.length + rows
        self.start, self.stop = start, start + rows
        self.write = store.layers(store.length, end)
        self.keys, self.values = store.keys(end), store.values(end)
        data = store.data
        self.visible = {
            window: (
                visible,
                visible.mask(data.dtype, data.device) if rows <= ROWS_AT_ONCE else None,
            )
            for window, visible in seen.items()
        }

    def attend(self, layer: int, window: int | None, queries: Tensor, fresh: Tensor) -> Tensor:
        self.write[layer].copy_(fresh.transpose(0, 1))
        visible, mask = self.visible[window]
        keys, values = self.keys[layer], self.values[layer]
        if visible.first:
            keys, values = keys[:, visible.first :], values[:, visible.first :]
        return attend(queries, keys, values, visible, mask)


class CachedAttention:
    """Writes each request's new keys and values behind its cache, and attends to that cache alone.

    Segment i owns the next n rows, at positions length .. length + n - 1 of its store. Lengths do not
    advance.

    If each request has only a few rows, one call serves the whole batch: the kernel's where there is one, the
    core's on a CPU in float32 or bfloat16. Everything else goes request by request through torch.
    """

    __slots__ = ("_parts", "_query_heads", "_reach_of", "_together", "_windows", "device")

    def __init__(
        self,
        segments: Sequence[tuple[KVStore, int]],
        query_heads: int,
        windows: Sequence[int | None],
        causal: bool,
        window_rule: str = "sliding",
        kernel: AttentionKernel | None = None,
    ) -> None:
        """`windows[l]` bounds what layer l sees (None: everything); a layer with a window is always causal,
        unless `window_rule` (`dspark.draft.config.WINDOW_RULES`) says otherwise. `kernel`: the model's."""
        self._query_heads = query_heads
        self._windows = windows
        self.device = segments[0][0].data.device
        for store, rows in segments:
            store.require(store.length + rows)
        kinds = list(dict.fromkeys(windows))
        hides_later = {
            w: causal or (w is not None and window_rule != "anchored, bidirectional") for w in kinds
        }
        anchored = window_rule != "sliding"
        self._parts: list[_Part] = []
        self._reach_of = {window: number for number, window in enumerate(kinds)}
        reaches = [(hides_later[w], w or 0, anchored) for w in kinds]
        self._together: AttentionPass | _core.Attention | None = None
        if kernel is not None and kernel.kernels is not None and suits_kernel(segments):
            self._together = AttentionPass(kernel.kernels, segments, query_heads, reaches)
        elif _suits_core(segments):
            self._together = _core_pass(segments, query_heads, reaches)
        if self._together is not None:
            return
        row = 0
        for store, rows in segments:
            seen = {w: Visible(rows, store.length + rows, hides_later[w], w, anchored) for w in kinds}
            self._parts.append(_Part(store, row, rows, seen))
            row += rows

    def layer(self, index: int, heads: Tensor) -> Tensor:
        """Layer `index`: heads `[rows, q + k + v heads, head_dim]` to `[rows, q heads * head_dim]`."""
        window = self._windows[index]
        if self._together is not None:
            return self._all_together(self._together, index, self._reach_of[window], heads)
        queries, fresh = heads[:, : self._query_heads], heads[:, self._query_heads :]
        if len(self._parts) == 1:
            return self._parts[0].attend(index, window, queries, fresh)
        return torch.cat(
            [
                part.attend(index, window, queries[part.start : part.stop], fresh[part.start : part.stop])
                for part in self._parts
            ]
        )

    def _all_together(
        self, together: AttentionPass | _core.Attention, index: int, reach: int, heads: Tensor
    ) -> Tensor:
        rows, _, head_dim = heads.shape
        row_stride, head_stride, stride = heads.stride()
        if (head_stride, stride) != (head_dim, 1):
            heads = heads.contiguous()
            row_stride = heads.stride(0)
        out = heads.new_empty((rows, self._query_heads * head_dim))
        together.layer(index, reach, heads.data_ptr(), row_stride, out.data_ptr())
        return out


def _core_pass(
    segments: Sequence[tuple[KVStore, int]], query_heads: int, reaches: list[tuple[bool, int, bool]]
) -> _core.Attention:
    first, _ = segments[0]
    region = parallel_region()
    return _core.Attention(
        _CORE_DTYPES[first.data.dtype],
        first.kv_heads,
        query_heads,
        first.data.shape[3],
        [(store.data.data_ptr(), store.capacity, store.length, rows) for store, rows in segments],
        reaches,
        region,
        torch.get_num_threads() if region else 1,
    )


def _suits_core(segments: Sequence[tuple[KVStore, int]]) -> bool:
    """Whether the core's attention can and should process these segments."""
    data = segments[0][0].data
    return (
        data.is_cpu
        and data.dtype in _CORE_DTYPES
        and data.shape[3] % _CORE_LANES == 0
        and all(rows <= FEW_ROWS for _, rows in segments)
        and not torch.is_grad_enabled()
    )
