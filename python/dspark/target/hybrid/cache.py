"""The cache of one request: keys and values of the attention layers, states of the linear ones."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from dspark.attention import KVStore
from dspark.errors import CapacityError
from dspark.layers.norm import accumulation_dtype
from dspark.target.hybrid.config import HybridConfig


class Waiting(Protocol):
    """The changes that the rows of a pass would make to the states of its requests."""

    def commit(self, index: int, count: int, conv: Tensor, state: Tensor) -> None:
        """Applies the first `count` rows of request `index` to its states, in place."""


class Pending(NamedTuple):
    """A request's rows of a pass until their commit; `number` is the request's index in `waiting`."""

    waiting: Waiting
    number: int
    rows: int


class Mark(NamedTuple):
    """The states as they were at a length."""

    length: int
    conv: Tensor
    state: Tensor


class HybridCache:
    """Keys, values and states, always as of the committed tokens: a pass reads the states without changing
    them, and what its rows would change waits beside them until `advance`.

    `conv` `[linear layers, kernel - 1, channels]` holds the last inputs of the convolutions, `state`
    `[linear layers, key heads, key_dim, groups, value_dim]` the recurrent states, in float32 or, for a
    float64 model, in float64. An earlier state cannot be recovered from a later one, so `mark` copies what a
    fork may need.
    """

    __slots__ = ("_again", "_mark", "_pending", "conv", "kv", "state")

    def __init__(self, config: HybridConfig, dtype: torch.dtype, device: torch.device) -> None:
        delta, layers = config.delta, config.linear_layers
        self.kv = KVStore(config.attention_layers, config.num_key_value_heads, config.head_dim, dtype, device)
        wide = accumulation_dtype(dtype)
        with torch.inference_mode():
            self.conv = torch.zeros(layers, delta.kernel - 1, delta.channels, dtype=wide, device=device)
            state = (layers, delta.key_heads, delta.key_dim, delta.groups, delta.value_dim)
            self.state = torch.zeros(state, dtype=wide, device=device)
        self._pending: Pending | None = None
        self._again: Callable[[HybridCache, int], None] | None = None
        self._mark: Mark | None = None

    @property
    def length(self) -> int:
        """Committed tokens."""
        return self.kv.length

    @property
    def position_bytes(self) -> int:
        """Bytes of keys and values."""
        return self.kv.position_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of the convolutions' inputs and the recurrent states."""
        return self.conv.nbytes + self.state.nbytes

    def reserve(self, positions: int) -> None:
        """Makes room for keys and values of `positions` positions; the size of states is fixed."""
        self.kv.reserve(positions)

    def mark(self) -> None:
        """Keeps the states of the present length, until the next mark, for a fork at that length."""
        with torch.inference_mode():
            self._mark = Mark(self.length, self.conv.clone(), self.state.clone()) if self.length else None

    def fork(self, length: int, room: int = 0) -> Self | None:
        """See `TargetCache.fork`: forks at the present length if `length` reaches it, else at the mark."""
        if 0 < self.length <= length:
            at = Mark(self.length, self.conv, self.state)
        elif self._mark is not None and self._mark.length <= length:
            at = self._mark
        else:
            return None
        kv = self.kv.fork(at.length, room)
        if kv is None:
            return None
        forked = copy(self)
        forked.kv, forked._pending, forked._again, forked._mark = kv, None, None, None
        with torch.inference_mode():
            forked.conv, forked.state = at.conv.clone(), at.state.clone()
        return forked

    def offer(self, waiting: Waiting, index: int, rows: int) -> None:
        """Replaces what waits for `advance` by `rows` rows of a pass, those of its request `index`."""
        self._pending, self._again = Pending(waiting, index, rows), None

    def keep_whole(self, again: Callable[[HybridCache, int], None]) -> None:
        """Says that the waiting rows can only be kept whole: to keep fewer, `again(cache, count)` runs a pass
        over the first `count` of them alone."""
        self._again = again

    def advance(self, count: int) -> None:
        """Keeps the first `count` rows of the last pass.

        Raises:
            CapacityError: more rows than that pass had, or no pass since the last commit.
        """
        rows = 0 if self._pending is None else self._pending.rows
        if not 0 <= count <= rows:
            raise CapacityError(
                f"cannot commit {count} rows at length {self.length}: {rows} wait since the last commit"
            )
        if count and self._pending is not None:
            with torch.inference_mode():
                if count < rows and self._again is not None:
                    self._again(self, count)
                self._pending.waiting.commit(self._pending.number, count, self.conv, self.state)
        self.kv.advance(count)
        self._pending = self._again = None
