"""One Gemma 4 decoder layer, with the published parameter names. Targets and drafts share it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.layers.decoder import Attend
from dspark.layers.norm import RMSNorm
from dspark.layers.rotary import rotate


@dataclass(frozen=True)
class Gemma4LayerShape:
    """What a layer is built from. `shared_values`: there is no v_proj."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    bias: bool
    shared_values: bool


class Gemma4Attention(nn.Module):
    """Grouped-query attention with norms on queries, keys and values, and scores that are not scaled.

    Shared values are what k_proj gives, before the keys' norm and rotation.
    """

    def __init__(self, shape: Gemma4LayerShape) -> None:
        super().__init__()
        queries = shape.num_attention_heads * shape.head_dim
        keys = shape.num_key_value_heads * shape.head_dim
        hidden, bias = shape.hidden_size, shape.bias
        self.head_dim, self.eps = shape.head_dim, shape.rms_norm_eps
        self.q_proj = nn.Linear(hidden, queries, bias=bias)
        self.k_proj = nn.Linear(hidden, keys, bias=bias)
        self.v_proj = None if shape.shared_values else nn.Linear(hidden, keys, bias=bias)
        self.o_proj = nn.Linear(queries, hidden, bias=bias)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)

    def queries(self, x: Tensor, rotation: Tensor) -> Tensor:
        """`[rows, heads, head_dim]`, rotated."""
        return rotate(self.q_norm(self._heads(self.q_proj(x))), rotation)

    def keys(self, x: Tensor, rotation: Tensor) -> Tensor:
        """`[rows, key heads, head_dim]`, rotated."""
        return rotate(self.k_norm(self._heads(self.k_proj(x))), rotation)

    def values(self, x: Tensor) -> Tensor:
        """`[rows, key heads, head_dim]`, normed without a weight."""
        heads = self._heads((self.v_proj or self.k_proj)(x))
        return F.rms_norm(heads, (self.head_dim,), None, self.eps)

    def forward(self, x: Tensor, rotation: Tensor, attend: Attend) -> Tensor:
        heads = torch.cat((self.queries(x, rotation), self.keys(x, rotation), self.values(x)), dim=1)
        return self.o_proj(attend(heads))  # type: ignore[no-any-return]

    def stored(self) -> list[nn.Linear]:
        """The linears that keys and values come from."""
        return [self.k_proj] if self.v_proj is None else [self.k_proj, self.v_proj]

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], -1, self.head_dim)


class Gemma4MLP(nn.Module):
    """down(gelu(gate(x)) * up(x)), with the tanh form of gelu."""

    def __init__(self, shape: Gemma4LayerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = F.gelu(self.gate_proj(x), approximate="tanh")
        return self.down_proj(gate * self.up_proj(x))  # type: ignore[no-any-return]


class Gemma4Layer(nn.Module):
    """Norms before and after each half, and a scalar on the output.

    Differentiable; `FrozenGemma4Layer` computes the same for inference. `layer_scalar` is stored with the
    weights and not trained.
    """

    def __init__(self, shape: Gemma4LayerShape) -> None:
        super().__init__()
        self.shape = shape
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        self.self_attn = Gemma4Attention(shape)
        self.mlp = Gemma4MLP(shape)
        self.input_layernorm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.pre_feedforward_layernorm = RMSNorm(hidden, eps)
        self.post_feedforward_layernorm = RMSNorm(hidden, eps)
        self.layer_scalar = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x: Tensor, rotation: Tensor, attend: Attend) -> Tensor:
        """x `[rows, hidden]`, rotation: rows of a `RotaryTable`, `[2, rows, head_dim]`."""
        attended = self.self_attn(self.input_layernorm(x), rotation, attend)
        x = x + self.post_attention_layernorm(attended)
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x * self.layer_scalar


def gemma4_layers(modules: nn.ModuleList) -> list[Gemma4Layer]:
    """The layers of a model, typed."""
    return [module for module in modules if isinstance(module, Gemma4Layer)]


def scaled_embedding(table: Tensor, token_ids: Tensor) -> Tensor:
    """Rows of the table times sqrt(hidden), the factor rounded to the table's dtype as in training."""
    return F.embedding(token_ids, table) * embedding_scale(table.shape[1], table.dtype)


@cache
def embedding_scale(hidden_size: int, dtype: torch.dtype) -> float:
    """sqrt(hidden) rounded to f32 and then to `dtype`: 62 for 3840 in bf16."""
    return float(torch.tensor(hidden_size**0.5, dtype=torch.float32).to(dtype))


def soft_capped(logits: Tensor, cap: float | None) -> Tensor:
    """cap tanh(logits / cap), in the logits' dtype and, without gradients, in their memory."""
    if cap is None:
        return logits
    if logits.requires_grad:
        return torch.tanh(logits / cap) * cap
    return logits.div_(cap).tanh_().mul_(cap)
