"""A stack of decoder layers for inference: fused products and as few operations as the arithmetic allows.

The cost of a pass over a few rows of a small model depends on the number of operations, not of bytes. So
whatever can be is prepared once: stacked weights, query scale and head norms folded into the rotation,
rotations of all layers in one product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.attention import CachedAttention
from dspark.layers.decoder import DecoderLayer
from dspark.layers.linear import FusedLinear
from dspark.layers.norm import FrozenNorm, RMSNorm, accumulation_dtype, scaled_weight

ROTATIONS_AT_ONCE = 1 << 18
"""Elements up to which the rotations of all layers are prepared together: beyond that, the memory costs more
than separate calls."""


class HeadRotation:
    """Head norm, query scale and rotation of a group of heads, for rows at given positions.

    For a head x with norm weight w and d entries, the rotated head is
    scale w x / rms(x) cos + roll(scale w x / rms(x), d/2) sin. With u = x / hypot(|x|, sqrt(d eps)), which is
    x / (rms(x) sqrt(d)), it is u a + roll(u, d/2) b, where a and b hold everything that does not depend on x.
    """

    __slots__ = ("accumulate", "factors", "half", "shift")

    def __init__(
        self, layers: Sequence[Sequence[tuple[RMSNorm | None, float, int]]], like: Tensor, head_dim: int
    ):
        """`layers[l]` lists groups of heads as (norm, scale, number of heads)."""
        self.accumulate = accumulation_dtype(like.dtype)
        self.half = head_dim // 2
        norms = [norm for layer in layers for norm, _, _ in layer if norm is not None]
        self.shift = None
        if norms:
            shift = math.sqrt(head_dim * norms[0].eps)
            self.shift = torch.tensor(shift, dtype=self.accumulate, device=like.device)
        else:
            layers = layers[:1]
        by_layer = [self._layer(layer, like, head_dim) for layer in layers]
        self.factors = torch.stack(by_layer, dim=1).unsqueeze(2)

    def _layer(
        self, groups: Sequence[tuple[RMSNorm | None, float, int]], like: Tensor, head_dim: int
    ) -> Tensor:
        rows = []
        for norm, scale, heads in groups:
            weight = torch.full((head_dim,), scale, dtype=self.accumulate, device=like.device)
            if norm is not None:
                weight = scaled_weight(norm) * scale
            rows.append(weight.expand(heads, head_dim))
        weights = torch.cat(rows)
        return torch.stack((weights, weights.roll(self.half, -1)))

    def prepare(self, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(a, b) of each layer, `[rows, heads, head_dim]`, for table rows `[2, rows, head_dim]`."""
        rows = rows.unsqueeze(1).unsqueeze(3)
        _, layers, _, heads, head_dim = self.factors.shape
        if rows.numel() * layers * heads > ROTATIONS_AT_ONCE:
            for factors in self.factors.unbind(1):
                a, b = (rows[:, 0] * factors).unbind(0)
                yield a, b
            return
        tables = (rows * self.factors).view(2 * layers, -1, heads, head_dim).unbind(0)
        yield from zip(tables[:layers], tables[layers:], strict=True)

    def prepare_all(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(a, b) of all layers, `[rows, layers, heads, head_dim]`."""
        a, b = (rows[:, :, None, None] * self.factors.transpose(1, 2)).unbind(0)
        return a, b

    def apply(self, heads: Tensor, a: Tensor, b: Tensor) -> None:
        """Rotates heads `[rows, (layers,) heads, head_dim]` in place."""
        unit = heads
        if self.shift is not None:
            length = torch.linalg.vector_norm(heads, 2, -1, True, dtype=self.accumulate)
            unit = heads / torch.hypot(length, self.shift)
        elif heads.dtype != self.accumulate:
            unit = heads.to(self.accumulate)
        torch.addcmul(unit * a, unit.roll(self.half, -1), b, out=heads)


class FrozenLayer:
    """`DecoderLayer` over `[rows, hidden]`, without gradients."""

    __slots__ = (
        "down",
        "gate_up",
        "norm_attention",
        "norm_mlp",
        "output",
        "qkv",
        "rotated",
        "rotation",
        "shape",
    )

    def __init__(self, layer: DecoderLayer, rotation: HeadRotation, ready: Callable[[str], None]) -> None:
        """Takes the weights out of the linears of `layer`, so that they are in memory only once. `ready` is
        called with a prefix of parameter names before those parameters are needed."""
        shape, attention, mlp = layer.shape, layer.self_attn, layer.mlp
        ready("self_attn.")
        self.norm_attention, self.qkv = normed_product(
            layer.input_layernorm, [attention.q_proj, attention.k_proj, attention.v_proj], release=True
        )
        self.output = FusedLinear([attention.o_proj], release=True)
        ready("mlp.gate_proj.")
        ready("mlp.up_proj.")
        self.norm_mlp, self.gate_up = normed_product(
            layer.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj], release=True
        )
        ready("mlp.down_proj.")
        self.down = FusedLinear([mlp.down_proj], release=True)
        self.rotation = rotation
        self.rotated = shape.num_attention_heads + shape.num_key_value_heads
        self.shape = (-1, self.rotated + shape.num_key_value_heads, shape.head_dim)

    def __call__(self, x: Tensor, a: Tensor, b: Tensor, attention: CachedAttention, index: int) -> Tensor:
        heads = self.qkv(self.norm_attention(x)).view(self.shape)
        self.rotation.apply(heads[:, : self.rotated], a, b)
        x = self.output.add(attention.layer(index, heads), x)
        gate, up = self.gate_up(self.norm_mlp(x)).chunk(2, -1)
        return self.down.add(F.silu(gate).mul_(up), x)


def normed_product(
    norm: RMSNorm, linears: Sequence[nn.Linear], release: bool = False
) -> tuple[FrozenNorm, FusedLinear]:
    """A norm and the products that alone read its output. In f32 and f64 the norm's weight is folded into
    theirs, which is exact up to rounding; f16 and bf16 weights would lose digits, so there it stays."""
    weight = norm.weight
    if accumulation_dtype(weight.dtype) != weight.dtype:
        return FrozenNorm(norm), FusedLinear(linears, release=release)
    return FrozenNorm(norm, weightless=True), FusedLinear(linears, scaled_weight(norm), release)


class FrozenStack:
    """All decoder layers of a model."""

    def __init__(self, layers: Sequence[DecoderLayer], ready: Callable[[int, str], None]) -> None:
        """Takes the weights out of the layers' linears, one by one. `ready` is called with a layer's index
        and a prefix of parameter names before those are needed. All norms must be filled beforehand."""
        shape = layers[0].shape
        groups = [_query_key_groups(layer) for layer in layers]
        like = layers[0].input_layernorm.weight
        self.rotation = HeadRotation(groups, like, shape.head_dim)
        self.layers: list[FrozenLayer] = []
        for index, layer in enumerate(layers):
            self.layers.append(FrozenLayer(layer, self.rotation, partial(ready, index)))

    def __call__(
        self,
        x: Tensor,
        rows: Tensor,
        attention: CachedAttention,
        outputs: dict[int, Tensor | None] | None = None,
    ) -> Tensor:
        """x `[rows, hidden]`, rows: those of a `RotaryTable`. The outputs of layers whose indices are keys of
        `outputs` are stored there."""
        rotations = self.rotation.prepare(rows)
        for index, layer in enumerate(self.layers):
            if (pair := next(rotations, None)) is not None:
                a, b = pair  # without head norms one pair serves every layer
            x = layer(x, a, b, attention, index)
            if outputs is not None and index in outputs:
                outputs[index] = x
        return x


def _query_key_groups(layer: DecoderLayer) -> list[tuple[RMSNorm | None, float, int]]:
    shape, attention = layer.shape, layer.self_attn
    return [
        (attention.q_norm, attention.scale, shape.num_attention_heads),
        (attention.k_norm, 1.0, shape.num_key_value_heads),
    ]
