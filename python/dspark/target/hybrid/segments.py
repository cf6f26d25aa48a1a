"""The linear layers' part of one pass: packed rows of several requests, each with its own states."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.target.hybrid import delta
from dspark.target.hybrid.cache import HybridCache
from dspark.target.hybrid.config import DeltaSizes
from dspark.target.hybrid.long import LongSegment
from dspark.target.hybrid.mixer import DeltaWeights
from dspark.target.hybrid.rows import Room, Rows


class DeltaPass:
    """Requests go through a layer together if none has more than `delta.AT_ONCE` rows, otherwise one by
    one."""

    __slots__ = ("_groups", "_rows")

    def __init__(self, segments: Sequence[tuple[HybridCache, int]], sizes: DeltaSizes) -> None:
        together = max(n for _, n in segments) <= delta.AT_ONCE
        parts = [segments] if together else [[segment] for segment in segments]
        self._groups = [_rows_of(part, sizes) for part in parts]
        self._rows = [sum(n for _, n in part) for part in parts]

    def layer(self, index: int, mixed: Tensor, weights: DeltaWeights) -> Tensor:
        """See `LayersOfPass.layer`."""
        if len(self._groups) == 1:
            return self._groups[0].layer(index, mixed, weights)
        pieces = torch.split(mixed, self._rows)
        return torch.cat(
            [group.layer(index, piece, weights) for group, piece in zip(self._groups, pieces, strict=True)]
        )


def _rows_of(segments: Sequence[tuple[HybridCache, int]], sizes: DeltaSizes) -> Rows:
    cache, count = segments[0]
    return LongSegment(cache, count, sizes) if count > delta.AT_ONCE else Group(segments, sizes)


class Group(Rows):
    """Requests with a few rows each. What `HybridCache.advance` needs to keep any number of rows is stored
    for every layer: convolution inputs, keys, decays and updates of the rows."""

    __slots__ = ("_conv", "_decays", "_keys", "_states", "_updates")

    def __init__(self, segments: Sequence[tuple[HybridCache, int]], sizes: DeltaSizes) -> None:
        caches, counts = [cache for cache, _ in segments], [n for _, n in segments]
        like = caches[0].state
        super().__init__(counts, sizes, like.device)
        batch, longest = self._shape
        layers, heads, groups = like.shape[0], sizes.key_heads, sizes.groups
        # Only the states: a group may outlive its pass, and must not keep caches alive.
        self._states = [cache.state for cache in caches]
        self._conv = like.new_empty(layers, batch, sizes.kernel - 1 + longest, sizes.channels)
        for number, cache in enumerate(caches):
            self._conv[:, number, : sizes.kernel - 1] = cache.conv
        self._keys = like.new_empty(layers, batch, heads, longest, sizes.key_dim)
        self._decays = like.new_empty(layers, batch, heads, groups, longest)
        self._updates = like.new_empty(layers, batch, heads, groups, longest, sizes.value_dim)
        for number, (cache, count) in enumerate(segments):
            cache.offer(self, number, count)

    def commit(self, index: int, count: int, conv: Tensor, state: Tensor) -> None:
        """Applies the first `count` rows of request `index` to its states."""
        conv.copy_(self._conv[:, index, count : count + self._sizes.kernel - 1])
        rows = slice(count)
        delta.carry(
            state,
            self._keys[:, index, :, rows],
            self._decays[:, index, :, :, rows],
            self._updates[:, index, :, :, rows],
        )

    def _room(self, index: int) -> Room:
        return Room(self._conv[index], self._decays[index])

    def _attend(self, index: int, room: Room, queries_keys: Tensor, values: Tensor, beta: Tensor) -> Tensor:
        self._keys[index].copy_(queries_keys[:, :, 1])
        reads = [
            delta.read_state(queries_keys[number], state[index]) for number, state in enumerate(self._states)
        ]
        read = torch.stack(reads) if len(reads) > 1 else reads[0].unsqueeze(0)
        out, fresh = delta.rows(queries_keys, values, room.log_decays, beta, read)
        self._updates[index].copy_(fresh)
        return out
