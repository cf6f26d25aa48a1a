"""The attention of one pass: packed rows of several requests, each with its own cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.attention.cache import KVStore
from dspark.attention.functional import attend


class CachedAttention:
    """Writes each request's new keys and values behind its cache, and attends to that cache alone.

    Segment i owns the next n rows, at positions length .. length + n - 1 of its store. Lengths do not advance.
    """

    def __init__(
        self,
        segments: Sequence[tuple[KVStore, int]],
        query_heads: int,
        windows: Sequence[int | None],
        causal: bool,
    ) -> None:
        """`windows[l]` bounds what layer l sees (None: everything); such a layer is causal in any case."""
        self._query_heads = query_heads
        self._windows = windows
        self._causal = causal
        self._parts = []
        row = 0
        for store, rows in segments:
            end = store.length + rows
            store.reserve(end)
            self._parts.append(
                (row, row + rows, store.layers(store.length, end), store.keys_t(end), store.values(end))
            )
            row += rows

    def layer(self, index: int, heads: Tensor) -> Tensor:
        """heads `[rows, q + k + v heads, head_dim]` of layer `index`, to `[rows, q heads * head_dim]`."""
        window = self._windows[index]
        causal = self._causal or window is not None
        queries, fresh = heads[:, : self._query_heads], heads[:, self._query_heads :]
        if len(self._parts) == 1:
            _, _, write, keys_t, values = self._parts[0]
            write[index].copy_(fresh.transpose(0, 1))
            return attend(queries, keys_t[index], values[index], causal, window)
        out = []
        for start, stop, write, keys_t, values in self._parts:
            write[index].copy_(fresh[start:stop].transpose(0, 1))
            out.append(attend(queries[start:stop], keys_t[index], values[index], causal, window))
        return torch.cat(out)
