"""The linear layers' part of a pass over many rows of one request, a part of its prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.errors import CapacityError
from dspark.target.hybrid import delta
from dspark.target.hybrid.cache import HybridCache
from dspark.target.hybrid.config import DeltaSizes
from dspark.target.hybrid.rows import Room, Rows


class LongSegment(Rows):
    """One request with more than `delta.AT_ONCE` rows, cut into pieces of that size.

    For a 27B model, inputs, keys and updates of all layers would take 3.5 MB for each row, 1.8 GB for a part
    of a prompt. The states between the pieces are computed anyway, so those after the last piece are kept
    instead: 157 MB however many rows there are. They include all rows, so a commit keeps all of them or none.
    """

    __slots__ = ("_before", "_conv", "_state")

    def __init__(self, cache: HybridCache, count: int, sizes: DeltaSizes) -> None:
        super().__init__([count], sizes, cache.state.device)
        self._before = cache.conv, cache.state
        self._conv, self._state = torch.empty_like(cache.conv), torch.empty_like(cache.state)
        cache.offer(self, 0, count)

    def commit(self, index: int, count: int, conv: Tensor, state: Tensor) -> None:
        """Applies all rows to the request's states."""
        if count != self._shape[1]:
            raise CapacityError(f"cannot commit {count} of {self._shape[1]} rows, only all of them")
        conv.copy_(self._conv)
        state.copy_(self._state)

    def _room(self, index: int) -> Room:
        sizes, count, before = self._sizes, self._shape[1], self._before[0][index]
        inputs = before.new_empty(1, sizes.kernel - 1 + count, sizes.channels)
        inputs[0, : sizes.kernel - 1] = before
        return Room(inputs, before.new_empty(1, sizes.key_heads, sizes.groups, count))

    def _attend(self, index: int, room: Room, queries_keys: Tensor, values: Tensor, beta: Tensor) -> Tensor:
        count, log_decays = self._shape[1], room.log_decays
        self._conv[index] = room.inputs[0, count:]
        state = self._state[index : index + 1].copy_(self._before[1][index])
        outs = []
        for start in range(0, count, delta.AT_ONCE):
            part = slice(start, min(start + delta.AT_ONCE, count))
            some, decays = queries_keys[:, :, :, part].contiguous(), log_decays[..., part]
            read = delta.read_state(some[0], state[0]).unsqueeze(0)
            out, updates = delta.rows(some, values[..., part, :], decays, beta[..., part], read)
            delta.carry(state, some[:, :, 1], decays, updates)
            outs.append(out)
        return torch.cat(outs, dim=3)
