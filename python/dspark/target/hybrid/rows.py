"""A linear layer's computation over the rows of a pass, whatever is kept of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.target.hybrid.config import DeltaSizes
from dspark.target.hybrid.mixer import DeltaWeights


class Room(NamedTuple):
    """Buffers for what a layer's rows would change in the states."""

    inputs: Tensor
    """`[B, kernel - 1 + N, channels]`: the convolution's inputs, after those that the states hold."""
    log_decays: Tensor
    """`[B, key heads, groups, N]`."""


class Rows(ABC):
    """Requests that go through every layer together, B of them with up to N rows.

    Shorter ones are padded at the end with their own last row: later rows never change earlier ones, and no
    request sees another's.
    """

    __slots__ = ("_pack", "_shape", "_sizes", "_unpack")

    def __init__(self, counts: Sequence[int], sizes: DeltaSizes, device: torch.device) -> None:
        longest = max(counts)
        self._sizes, self._shape = sizes, (len(counts), longest)
        self._pack = self._unpack = None
        if min(counts) < longest:
            pack: list[int] = []
            unpack: list[int] = []
            start = 0
            for number, count in enumerate(counts):
                pack += [start + min(row, count - 1) for row in range(longest)]
                unpack += range(number * longest, number * longest + count)
                start += count
            self._pack = torch.tensor(pack, device=device)
            self._unpack = torch.tensor(unpack, device=device)

    @abstractmethod
    def _room(self, index: int) -> Room:
        """The buffers of linear layer `index`; the inputs begin with those that the states hold."""

    @abstractmethod
    def _attend(self, index: int, room: Room, queries_keys: Tensor, values: Tensor, beta: Tensor) -> Tensor:
        """Outputs `[B, key heads, groups, N, value_dim]`; keeps what a commit needs."""

    def layer(self, index: int, mixed: Tensor, weights: DeltaWeights) -> Tensor:
        """See `LayersOfPass.layer`."""
        sizes, (batch, count) = self._sizes, self._shape
        packed = mixed if self._pack is None else mixed.index_select(0, self._pack)
        packed = packed.view(batch, count, -1)
        inputs, strengths = packed[..., : sizes.channels], packed[..., sizes.channels + sizes.values :]
        room = self._room(index)
        queries_keys, values = self._heads(self._convolve(room.inputs, inputs, weights), weights)
        beta = self._gates(room.log_decays, strengths, weights)
        unit = weights.norm_heads(self._attend(index, room, queries_keys, values, beta))
        if self._unpack is not None:
            unit = unit.index_select(0, self._unpack)
        gate = F.silu(mixed[:, sizes.channels : sizes.channels + sizes.values].to(unit.dtype))
        return unit.mul_(gate).to(mixed.dtype)

    def _convolve(self, buffer: Tensor, inputs: Tensor, weights: DeltaWeights) -> Tensor:
        """Causal depthwise convolution and silu, `[B, N, channels]`."""
        count = self._shape[1]
        buffer[:, self._sizes.kernel - 1 :].copy_(inputs)
        out = buffer[:, :count] * weights.taps[0]
        for offset, tap in enumerate(weights.taps[1:], 1):
            out.addcmul_(buffer[:, offset : offset + count], tap)
        return F.silu(out, inplace=True)

    def _heads(self, mixed: Tensor, weights: DeltaWeights) -> tuple[Tensor, Tensor]:
        """Queries and keys of length 1 `[B, key heads, 2, N, key_dim]`, values `[B, key heads, groups, N,
        value_dim]`. The norm of the outputs accounts for the query's scale key_dim^-1/2."""
        sizes, (batch, count) = self._sizes, self._shape
        both = 2 * sizes.key_heads * sizes.key_dim
        raw = mixed[..., :both].view(batch, count, 2, sizes.key_heads, sizes.key_dim).permute(0, 3, 2, 1, 4)
        length = torch.linalg.vector_norm(raw, 2, -1, True).hypot_(weights.unit_shift)
        queries_keys = torch.div(raw, length, out=mixed.new_empty(raw.shape))
        values = mixed[..., both:].view(batch, count, sizes.key_heads, sizes.groups, sizes.value_dim)
        return queries_keys, values.permute(0, 2, 3, 1, 4)

    def _gates(self, log_decays: Tensor, strengths: Tensor, weights: DeltaWeights) -> Tensor:
        """Writes the log decays -exp(A_log) softplus(a + dt_bias); returns the strengths sigmoid(b)."""
        sizes, (batch, count) = self._sizes, self._shape
        by_head = strengths.to(log_decays.dtype).view(batch, count, 2, sizes.key_heads, sizes.groups)
        b, a = by_head.permute(2, 0, 3, 4, 1)
        torch.mul(F.softplus(a + weights.time_bias), weights.rate, out=log_decays)
        return torch.sigmoid(b)
