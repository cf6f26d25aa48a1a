"""The cache of one request: keys and values of the attention layers, states of the linear ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dspark.attention import KVStore
from dspark.errors import CapacityError
from dspark.layers.norm import accumulation_dtype
from dspark.target.hybrid.config import HybridConfig

if TYPE_CHECKING:
    from dspark.target.hybrid.segments import Group


class HybridCache:
    """Everything is at the committed tokens, always: a pass reads the states and leaves them, and what its
    rows would change waits beside them until `advance`.

    `conv` `[linear layers, kernel - 1, channels]` holds the last inputs of the convolutions, `state`
    `[linear layers, key heads, key_dim, groups, value_dim]` the recurrent states, in float32 or, for a
    float64 model, in float64.
    """

    __slots__ = ("_pending", "conv", "kv", "state")

    def __init__(self, config: HybridConfig, dtype: torch.dtype, device: torch.device) -> None:
        delta, layers = config.delta, config.linear_layers
        self.kv = KVStore(config.attention_layers, config.num_key_value_heads, config.head_dim, dtype, device)
        wide = accumulation_dtype(dtype)
        with torch.inference_mode():
            self.conv = torch.zeros(layers, delta.kernel - 1, delta.channels, dtype=wide, device=device)
            state = (layers, delta.key_heads, delta.key_dim, delta.groups, delta.value_dim)
            self.state = torch.zeros(state, dtype=wide, device=device)
        self._pending: tuple[Group, int, int] | None = None

    @property
    def length(self) -> int:
        """Committed tokens."""
        return self.kv.length

    def offer(self, group: Group, index: int, rows: int) -> None:
        """Replaces what waits for `advance`: `rows` rows, request `index` of `group`."""
        self._pending = (group, index, rows)

    def advance(self, count: int) -> None:
        """Keeps the first `count` rows of the last pass.

        Raises:
            CapacityError: more rows than that pass had, or nothing has passed since the last commit.
        """
        rows = 0 if self._pending is None else self._pending[2]
        if not 0 <= count <= rows:
            raise CapacityError(
                f"cannot commit {count} rows at length {self.length}: {rows} wait since the last commit"
            )
        if count and self._pending is not None:
            group, index, _ = self._pending
            with torch.inference_mode():
                group.commit(index, count, self.conv, self.state)
        self.kv.advance(count)
        self._pending = None
