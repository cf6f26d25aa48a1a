"""One pre-norm decoder layer of the Llama and Qwen family, with the published parameter names."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.layers.norm import RMSNorm
from dspark.layers.rotary import rotate

Attend = Callable[[Tensor], Tensor]
"""Attention of one layer: heads `[rows, q + k + v heads, head_dim]`, q scaled and rotated, k rotated, to
`[rows, q heads * head_dim]`. It decides itself where keys and values go and what is visible."""


class KeysValues(Protocol):
    """What a draft's context needs of an attention module: keys and values `[rows, key heads, head_dim]`."""

    def keys(self, x: Tensor, rotation: Tensor) -> Tensor: ...
    def values(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class LayerShape:
    """What a decoder layer is built from."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


class SelfAttention(nn.Module):
    """Projections of grouped-query attention, with or without norms on queries and keys."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        queries = shape.num_attention_heads * shape.head_dim
        keys = shape.num_key_value_heads * shape.head_dim
        self.head_dim = shape.head_dim
        self.scale = 1.0 / math.sqrt(shape.head_dim)
        self.q_proj = nn.Linear(shape.hidden_size, queries, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(shape.hidden_size, keys, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(shape.hidden_size, keys, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=shape.output_bias)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps) if shape.qk_norm else None
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps) if shape.qk_norm else None

    def queries(self, x: Tensor, rotation: Tensor) -> Tensor:
        """`[rows, heads, head_dim]`, rotated, scaled by head_dim^-1/2."""
        heads = self._heads(self.q_proj(x), self.q_norm)
        return rotate(heads, rotation) * self.scale

    def keys(self, x: Tensor, rotation: Tensor) -> Tensor:
        """`[rows, key heads, head_dim]`, rotated."""
        return rotate(self._heads(self.k_proj(x), self.k_norm), rotation)

    def values(self, x: Tensor) -> Tensor:
        """`[rows, key heads, head_dim]`."""
        return self._heads(self.v_proj(x), None)

    def forward(self, x: Tensor, rotation: Tensor, attend: Attend) -> Tensor:
        heads = torch.cat((self.queries(x, rotation), self.keys(x, rotation), self.values(x)), dim=1)
        return self.o_proj(attend(heads))  # type: ignore[no-any-return]

    def _heads(self, x: Tensor, norm: RMSNorm | None) -> Tensor:
        heads = x.view(x.shape[0], -1, self.head_dim)
        return heads if norm is None else norm(heads)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=shape.mlp_bias)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=shape.mlp_bias)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=shape.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """Differentiable and readable; `dspark.layers.frozen.FrozenLayer` computes the same for inference."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.shape = shape
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = SelfAttention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = GatedMLP(shape)

    def forward(self, x: Tensor, rotation: Tensor, attend: Attend) -> Tensor:
        """x `[rows, hidden]`, rotation: rows of a `RotaryTable`, `[2, rows, head_dim]`."""
        x = x + self.self_attn(self.input_layernorm(x), rotation, attend)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


def decoder_layers(modules: nn.ModuleList) -> list[DecoderLayer]:
    """The layers of a model, typed."""
    return [module for module in modules if isinstance(module, DecoderLayer)]
