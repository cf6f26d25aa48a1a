"""A hybrid target's layers for inference: fused products, and as few operations as the arithmetic allows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.attention import CachedAttention
from dspark.layers.decoder import GatedMLP
from dspark.layers.frozen import HeadRotation, normed_product
from dspark.layers.linear import FusedLinear
from dspark.layers.norm import RMSNorm
from dspark.target.hybrid.config import HybridConfig
from dspark.target.hybrid.mixer import DeltaWeights
from dspark.target.hybrid.modules import GatedAttention, HybridDecays, HybridLayer, HybridWeights
from dspark.target.hybrid.recurrence import LayersOfPass
from dspark.target.hybrid.rotary import reordered_norm, whole_head_order


class FrozenGatedAttention:
    """Grouped-query attention whose output is multiplied by the sigmoid of gates. One product gives queries,
    keys, values and gates."""

    __slots__ = ("attended", "norm", "output", "product", "rotated", "rotation", "shape", "width")

    def __init__(self, layer: HybridLayer, config: HybridConfig, rotation: HeadRotation) -> None:
        heads, kv_heads, head = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        attention = layer.self_attn
        order = whole_head_order(head, config.rotary_dim)
        both = torch.arange(2 * heads * head).view(heads, 2, head)
        keys = torch.arange(kv_heads * head).view(kv_heads, head)
        linears = [
            _rows(attention.q_proj, both[:, 0, order]),
            _rows(attention.k_proj, keys[:, order]),
            attention.v_proj,
            _rows(attention.q_proj, both[:, 1]),
        ]
        self.norm, self.product = normed_product(layer.input_layernorm, linears)
        self.output = FusedLinear([attention.o_proj])
        self.rotation = rotation
        self.rotated = heads + kv_heads
        self.attended = self.rotated + kv_heads
        self.shape = (-1, self.attended + heads, head)
        self.width = heads * head

    def __call__(self, x: Tensor, a: Tensor, b: Tensor, attention: CachedAttention, index: int) -> Tensor:
        mixed = self.product(self.norm(x))
        heads = mixed.view(self.shape)
        self.rotation.apply(heads[:, : self.rotated], a, b)
        out = attention.layer(index, heads[:, : self.attended])
        return self.output.add(out * mixed[:, -self.width :].sigmoid(), x)


class FrozenMLP:
    """x + down(silu(gate(n)) * up(n)), n the normed x."""

    __slots__ = ("down", "gate_up", "norm")

    def __init__(self, norm: RMSNorm, mlp: GatedMLP) -> None:
        self.norm, self.gate_up = normed_product(norm, [mlp.gate_proj, mlp.up_proj])
        self.down = FusedLinear([mlp.down_proj])

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
        return self.down.add(F.silu(gate).mul_(up), x)


@dataclass(frozen=True, slots=True)
class FrozenHybridLayer:
    """A mixer, its number among the mixers of its kind, and an MLP."""

    mixer: FrozenGatedAttention | DeltaWeights
    number: int
    mlp: FrozenMLP


class FrozenHybridStack:
    """All layers. They are built one by one, and each drops its separate weights, so that a model is never in
    memory twice."""

    def __init__(self, weights: HybridWeights, decays: HybridDecays, config: HybridConfig) -> None:
        order = whole_head_order(config.head_dim, config.rotary_dim)
        full = [index for index, linear in enumerate(config.is_linear) if not linear]
        self.rotation = HeadRotation(
            [_head_groups(weights.layer(index).self_attn, config, order) for index in full],
            weights.norm.weight,
            config.head_dim,
        )
        self.layers: list[FrozenHybridLayer] = []
        numbers = {True: 0, False: 0}
        for index, linear in enumerate(config.is_linear):
            layer = weights.layer(index)
            mixer: FrozenGatedAttention | DeltaWeights
            if linear:
                mixer = DeltaWeights(layer, decays.of(index), config.delta)
            else:
                mixer = FrozenGatedAttention(layer, config, self.rotation)
            mlp = FrozenMLP(layer.post_attention_layernorm, layer.mlp)
            self.layers.append(FrozenHybridLayer(mixer, numbers[linear], mlp))
            numbers[linear] += 1
            weights.layers[index] = nn.Identity()

    def __call__(
        self,
        x: Tensor,
        rows: Tensor,
        attention: CachedAttention,
        delta: LayersOfPass,
        outputs: dict[int, Tensor | None],
    ) -> Tensor:
        """x `[rows, hidden]`, rows: those of a `PartialRotaryTable`. The outputs of layers whose indices are
        keys of `outputs` are stored there."""
        rotations = self.rotation.prepare(rows)
        for index, layer in enumerate(self.layers):
            mixer = layer.mixer
            if isinstance(mixer, DeltaWeights):
                mixed = mixer.product(mixer.norm(x))
                x = mixer.output.add(delta.layer(layer.number, mixed, mixer), x)
            else:
                x = mixer(x, *next(rotations), attention, layer.number)
            x = layer.mlp(x)
            if index in outputs:
                outputs[index] = x
        return x


def _head_groups(
    attention: GatedAttention, config: HybridConfig, order: list[int]
) -> Sequence[tuple[RMSNorm | None, float, int]]:
    scale = 1.0 / math.sqrt(config.head_dim)
    return [
        (reordered_norm(attention.q_norm, order), scale, config.num_attention_heads),
        (reordered_norm(attention.k_norm, order), 1.0, config.num_key_value_heads),
    ]


def _rows(linear: nn.Linear, rows: Tensor) -> nn.Linear:
    """The linear that gives these outputs of `linear`, in this order."""
    index = rows.reshape(-1).to(linear.weight.device)
    part = nn.Linear(linear.in_features, len(index), bias=linear.bias is not None, device="meta")
    part.weight = nn.Parameter(linear.weight.detach()[index], requires_grad=False)
    if linear.bias is not None:
        part.bias = nn.Parameter(linear.bias.detach()[index], requires_grad=False)
    return part
