"""The attention of one pass: packed rows of several requests, each with its own cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.attention.cache import KVStore
from dspark.attention.functional import ROWS_AT_ONCE, attend
from dspark.attention.visible import Visible


class _Part:
    """One request's rows: views into its cache, for every layer, and the masks that the layers share."""

    __slots__ = ("keys_t", "start", "stop", "values", "visible", "write")

    def __init__(
        self,
        store: KVStore,
        start: int,
        rows: int,
        groups: int,
        windows: Sequence[int | None],
        causal: bool,
        window_rule: str,
    ) -> None:
        end = store.length + rows
        store.require(end)
        self.start, self.stop = start, start + rows
        self.write = store.layers(store.length, end)
        self.keys_t, self.values = store.keys_t(end), store.values(end)
        data = store.data
        self.visible: dict[int | None, tuple[Visible, Tensor | None]] = {}
        for window in set(windows):
            hides_later = causal or (window is not None and window_rule != "anchored, bidirectional")
            visible = Visible(rows, end, hides_later, window, window_rule != "sliding")
            mask = visible.mask(groups, data.dtype, data.device) if rows <= ROWS_AT_ONCE else None
            self.visible[window] = visible, mask

    def attend(self, layer: int, window: int | None, queries: Tensor, fresh: Tensor) -> Tensor:
        self.write[layer].copy_(fresh.transpose(0, 1))
        visible, mask = self.visible[window]
        keys_t, values = self.keys_t[layer], self.values[layer]
        if visible.first:
            keys_t, values = keys_t[..., visible.first :], values[:, visible.first :]
        return attend(queries, keys_t, values, visible, mask)


class CachedAttention:
    """Writes each request's new keys and values behind its cache, and attends to that cache alone.

    Segment i owns the next n rows, at positions length .. length + n - 1 of its store. Lengths do not
    advance.
    """

    __slots__ = ("_parts", "_query_heads", "_windows", "device")

    def __init__(
        self,
        segments: Sequence[tuple[KVStore, int]],
        query_heads: int,
        windows: Sequence[int | None],
        causal: bool,
        window_rule: str = "sliding",
    ) -> None:
        """`windows[l]` bounds what layer l sees (None: everything); such a layer is causal in any case,
        unless `window_rule` (`dspark.draft.config.WINDOW_RULES`) says otherwise."""
        self._query_heads = query_heads
        self._windows = windows
        self.device = segments[0][0].data.device
        self._parts: list[_Part] = []
        row = 0
        for store, rows in segments:
            self._parts.append(
                _Part(store, row, rows, query_heads // store.kv_heads, windows, causal, window_rule)
            )
            row += rows

    def layer(self, index: int, heads: Tensor) -> Tensor:
        """heads `[rows, q + k + v heads, head_dim]` of layer `index`, to `[rows, q heads * head_dim]`."""
        window = self._windows[index]
        queries, fresh = heads[:, : self._query_heads], heads[:, self._query_heads :]
        if len(self._parts) == 1:
            return self._parts[0].attend(index, window, queries, fresh)
        return torch.cat(
            [
                part.attend(index, window, queries[part.start : part.stop], fresh[part.start : part.stop])
                for part in self._parts
            ]
        )
