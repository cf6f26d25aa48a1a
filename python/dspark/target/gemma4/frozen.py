"""Gemma 4 layers for inference: fused products, and norms and rotations prepared once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.layers.decoder import Attend
from dspark.layers.frozen import HeadRotation, normed_product
from dspark.layers.linear import FusedLinear
from dspark.layers.norm import FrozenNorm, RMSNorm
from dspark.target.gemma4.layer import Gemma4Layer


class KindPass(NamedTuple):
    """What the layers of one kind need in a pass."""

    rows: Tensor
    """Rows of their `RotaryTable`, `[2, rows, head_dim]`."""
    attend: Callable[[int, Tensor], Tensor]
    """Their attention, called with the layer's number among its kind."""


class FrozenGemma4Layer:
    """`Gemma4Layer` over `[rows, hidden]`, without gradients."""

    __slots__ = (
        "down",
        "gate_up",
        "kv_heads",
        "norm_attention",
        "norm_mlp",
        "output",
        "post_attention",
        "post_mlp",
        "qkv",
        "rotated",
        "rotation",
        "scalar",
        "shape",
        "value_norm",
    )

    def __init__(self, layer: Gemma4Layer, rotation: HeadRotation) -> None:
        """Takes the weights out of the linears of `layer`, so that they are in memory only once."""
        shape, attention, mlp = layer.shape, layer.self_attn, layer.mlp
        self.norm_attention, self.qkv = normed_product(
            layer.input_layernorm, [attention.q_proj, *attention.stored()], release=True
        )
        self.norm_mlp, self.gate_up = normed_product(
            layer.pre_feedforward_layernorm, [mlp.gate_proj, mlp.up_proj], release=True
        )
        self.output = FusedLinear([attention.o_proj], release=True)
        self.down = FusedLinear([mlp.down_proj], release=True)
        self.post_attention = FrozenNorm(layer.post_attention_layernorm)
        self.post_mlp = FrozenNorm(layer.post_feedforward_layernorm)
        self.value_norm = value_norm(layer)
        self.scalar = layer.layer_scalar.detach()
        self.rotation = rotation
        self.rotated = shape.num_attention_heads + shape.num_key_value_heads
        self.kv_heads = shape.num_key_value_heads
        self.shape = (-1, self.rotated + (0 if shape.shared_values else self.kv_heads), shape.head_dim)

    def __call__(self, x: Tensor, a: Tensor, b: Tensor, attend: Attend) -> Tensor:
        heads = self.qkv(self.norm_attention(x)).view(self.shape)
        queries_keys = heads[:, : self.rotated]
        values = self.value_norm(heads[:, -self.kv_heads :])  # shared values are the keys before rotation
        self.rotation.apply(queries_keys, a, b)
        attended = attend(torch.cat((queries_keys, values), dim=1))
        x = self.post_attention(self.output(attended)).add_(x)
        gate, up = self.gate_up(self.norm_mlp(x)).chunk(2, -1)
        mixed = self.down(F.gelu(gate, approximate="tanh").mul_(up))
        return self.post_mlp(mixed).add_(x).mul_(self.scalar)


def value_norm(layer: Gemma4Layer) -> FrozenNorm:
    """The norm of values, which has no weight of its own."""
    like = layer.input_layernorm.weight
    norm = RMSNorm(layer.shape.head_dim, layer.shape.rms_norm_eps)
    return FrozenNorm(norm.to(device=like.device, dtype=like.dtype))


def head_rotation(layers: Sequence[Gemma4Layer]) -> HeadRotation:
    """Norms and rotations of queries and keys of layers of one kind."""
    groups = [
        [
            (layer.self_attn.q_norm, 1.0, layer.shape.num_attention_heads),
            (layer.self_attn.k_norm, 1.0, layer.shape.num_key_value_heads),
        ]
        for layer in layers
    ]
    return HeadRotation(groups, layers[0].input_layernorm.weight, layers[0].shape.head_dim)


class FrozenGemma4Stack:
    """All decoder layers of a model; `kinds[l]` names the kind of layer l."""

    def __init__(
        self,
        layers: Sequence[Gemma4Layer],
        kinds: Sequence[str],
        ready: Callable[[int], None] = lambda index: None,
    ) -> None:
        """`ready` is called with each layer's index before its linears are needed. All norms must be filled
        beforehand."""
        self.kinds = tuple(kinds)
        self.rotations = {
            kind: head_rotation([layer for layer, its in zip(layers, kinds, strict=True) if its == kind])
            for kind in set(kinds)
        }
        self.layers: list[FrozenGemma4Layer] = []
        for index, (layer, kind) in enumerate(zip(layers, kinds, strict=True)):
            ready(index)
            self.layers.append(FrozenGemma4Layer(layer, self.rotations[kind]))

    def __call__(
        self, x: Tensor, passes: dict[str, KindPass], outputs: dict[int, Tensor | None] | None = None
    ) -> Tensor:
        """x `[rows, hidden]`. The outputs of layers whose indices are keys of `outputs` are stored there."""
        prepared = {
            kind: enumerate(self.rotations[kind].prepare(passes[kind].rows)) for kind in self.rotations
        }
        for index, (layer, kind) in enumerate(zip(self.layers, self.kinds, strict=True)):
            own, (a, b) = next(prepared[kind])
            x = layer(x, a, b, partial(passes[kind].attend, own))
            if outputs is not None and index in outputs:
                outputs[index] = x
        return x
