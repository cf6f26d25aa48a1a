"""The linear layers' part of one pass: packed rows of several requests, each with its own states."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.target.hybrid import delta
from dspark.target.hybrid.cache import HybridCache
from dspark.target.hybrid.config import DeltaSizes
from dspark.target.hybrid.mixer import DeltaWeights


class DeltaPass:
    """All requests with at most `delta.AT_ONCE` rows go through a layer together; with a longer one, each
    goes alone."""

    __slots__ = ("_groups", "_rows")

    def __init__(self, segments: Sequence[tuple[HybridCache, int]], sizes: DeltaSizes) -> None:
        together = max(n for _, n in segments) <= delta.AT_ONCE
        parts = [segments] if together else [[segment] for segment in segments]
        self._groups = [Group(part, sizes) for part in parts]
        self._rows = [sum(n for _, n in part) for part in parts]

    def layer(self, index: int, mixed: Tensor, weights: DeltaWeights) -> Tensor:
        """mixed `[rows, channels + values + 2 value heads]` of linear layer `index`, to `[rows, values]`."""
        if len(self._groups) == 1:
            return self._groups[0].layer(index, mixed, weights)
        pieces = torch.split(mixed, self._rows)
        return torch.cat(
            [group.layer(index, piece, weights) for group, piece in zip(self._groups, pieces, strict=True)]
        )


class Group:
    """Requests that go through every layer together, B of them with up to N rows.

    Shorter ones are padded behind with their own last row: what follows a row never changes it, and no
    request sees another's. What `HybridCache.advance` needs is kept for every layer: convolution inputs,
    keys, decays and updates of the rows.
    """

    __slots__ = (
        "_conv",
        "_decays",
        "_keys",
        "_pack",
        "_shape",
        "_sizes",
        "_states",
        "_unpack",
        "_updates",
    )

    def __init__(self, segments: Sequence[tuple[HybridCache, int]], sizes: DeltaSizes) -> None:
        caches, counts = [cache for cache, _ in segments], [n for _, n in segments]
        batch, longest = len(counts), max(counts)
        like = caches[0].state
        layers = like.shape[0]
        heads, groups = sizes.key_heads, sizes.groups
        # States alone: a group may outlive its pass, and must not keep caches alive.
        self._sizes, self._states, self._shape = sizes, [cache.state for cache in caches], (batch, longest)
        self._pack = self._unpack = None
        if min(counts) < longest:
            pack: list[int] = []
            unpack: list[int] = []
            start = 0
            for number, count in enumerate(counts):
                pack += [start + min(row, count - 1) for row in range(longest)]
                unpack += range(number * longest, number * longest + count)
                start += count
            self._pack = torch.tensor(pack, device=like.device)
            self._unpack = torch.tensor(unpack, device=like.device)
        self._conv = like.new_empty(layers, batch, sizes.kernel - 1 + longest, sizes.channels)
        for number, cache in enumerate(caches):
            self._conv[:, number, : sizes.kernel - 1] = cache.conv
        self._keys = like.new_empty(layers, batch, heads, longest, sizes.key_dim)
        self._decays = like.new_empty(layers, batch, heads, groups, longest)
        self._updates = like.new_empty(layers, batch, heads, groups, longest, sizes.value_dim)
        for number, (cache, count) in enumerate(segments):
            cache.offer(self, number, count)

    def commit(self, index: int, count: int, conv: Tensor, state: Tensor) -> None:
        """Takes the first `count` rows of request `index` into its states."""
        conv.copy_(self._conv[:, index, count : count + self._sizes.kernel - 1])
        rows = slice(count)
        delta.carry(
            state,
            self._keys[:, index, :, rows],
            self._decays[:, index, :, :, rows],
            self._updates[:, index, :, :, rows],
        )

    def layer(self, index: int, mixed: Tensor, weights: DeltaWeights) -> Tensor:
        """See `DeltaPass.layer`."""
        sizes, (batch, count) = self._sizes, self._shape
        packed = mixed if self._pack is None else mixed.index_select(0, self._pack)
        packed = packed.view(batch, count, -1)
        inputs, strengths = packed[..., : sizes.channels], packed[..., sizes.channels + sizes.values :]
        queries_keys, values = self._heads(self._convolve(index, inputs, weights), weights)
        beta = self._gates(index, strengths, weights)
        self._keys[index].copy_(queries_keys[:, :, 1])
        out = self._attend(index, queries_keys, values, beta)
        unit = weights.norm_heads(out)
        if self._unpack is not None:
            unit = unit.index_select(0, self._unpack)
        gate = F.silu(mixed[:, sizes.channels : sizes.channels + sizes.values].to(unit.dtype))
        return unit.mul_(gate).to(mixed.dtype)

    def _convolve(self, index: int, inputs: Tensor, weights: DeltaWeights) -> Tensor:
        """Causal depthwise convolution and silu, `[B, N, channels]`."""
        buffer, count = self._conv[index], self._shape[1]
        buffer[:, self._sizes.kernel - 1 :].copy_(inputs)
        out = buffer[:, :count] * weights.taps[0]
        for offset, tap in enumerate(weights.taps[1:], 1):
            out.addcmul_(buffer[:, offset : offset + count], tap)
        return F.silu(out, inplace=True)

    def _heads(self, mixed: Tensor, weights: DeltaWeights) -> tuple[Tensor, Tensor]:
        """Queries and keys of length 1 `[B, key heads, 2, N, key_dim]`, values `[B, key heads, groups, N,
        value_dim]`. The query's scale key_dim^-1/2 is in the norm of the outputs."""
        sizes, (batch, count) = self._sizes, self._shape
        both = 2 * sizes.key_heads * sizes.key_dim
        raw = mixed[..., :both].view(batch, count, 2, sizes.key_heads, sizes.key_dim).permute(0, 3, 2, 1, 4)
        length = torch.linalg.vector_norm(raw, 2, -1, True).hypot_(weights.unit_shift)
        queries_keys = torch.div(raw, length, out=mixed.new_empty(raw.shape))
        values = mixed[..., both:].view(batch, count, sizes.key_heads, sizes.groups, sizes.value_dim)
        return queries_keys, values.permute(0, 2, 3, 1, 4)

    def _gates(self, index: int, strengths: Tensor, weights: DeltaWeights) -> Tensor:
        """Writes the log decays -exp(A_log) softplus(a + dt_bias); returns the strengths sigmoid(b)."""
        sizes, (batch, count) = self._sizes, self._shape
        by_head = strengths.to(self._decays.dtype).view(batch, count, 2, sizes.key_heads, sizes.groups)
        b, a = by_head.permute(2, 0, 3, 4, 1)
        torch.mul(F.softplus(a + weights.time_bias), weights.rate, out=self._decays[index])
        return torch.sigmoid(b)

    def _attend(self, index: int, queries_keys: Tensor, values: Tensor, beta: Tensor) -> Tensor:
        """Outputs `[B, key heads, groups, N, value_dim]`; writes the updates."""
        decays, updates, count = self._decays[index], self._updates[index], self._shape[1]
        if count <= delta.AT_ONCE:
            reads = [
                delta.read_state(queries_keys[number], state[index])
                for number, state in enumerate(self._states)
            ]
            read = torch.stack(reads) if len(reads) > 1 else reads[0].unsqueeze(0)
            out, fresh = delta.rows(queries_keys, values, decays, beta, read)
            updates.copy_(fresh)
            return out
        state, pieces = self._states[0][index : index + 1].clone(), []
        for start in range(0, count, delta.AT_ONCE):
            part = slice(start, min(start + delta.AT_ONCE, count))
            some = queries_keys[:, :, :, part].contiguous()
            read = delta.read_state(some[0], state[0]).unsqueeze(0)
            out, fresh = delta.rows(some, values[..., part, :], decays[..., part], beta[..., part], read)
            updates[..., part, :] = fresh
            delta.carry(state, some[:, :, 1], decays[..., part], fresh)
            pieces.append(out)
        return torch.cat(pieces, dim=3)
