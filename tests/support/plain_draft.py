"""A draft's block written plainly, without any cache: what models are compared with."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from model_zoo import HEAD_DIM, HIDDEN

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}
WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}


def rms(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def plain_block(
    tensors: dict[str, Tensor],
    config: dict[str, Any],
    taps: Tensor,
    anchor: int,
    embeddings: Tensor,
    rule: str = "sliding",
    causal: bool = False,
) -> Tensor:
    """The backbone's output `[block, hidden]`, from the taps of the whole context and without any cache."""
    size, context = config["block_size"], len(taps)
    switches = config.get("dflash_config", config)
    ids = torch.tensor([anchor, *[switches["mask_token_id"]] * (size - 1)])
    x = embeddings[ids]
    seen = rms(taps @ tensors["fc.weight"].T, tensors["hidden_norm.weight"])
    rotary = Qwen3RotaryEmbedding(
        Qwen3Config(
            head_dim=HEAD_DIM, rope_parameters=dict(config["rope_parameters"]), max_position_embeddings=64
        )
    )
    cos, sin = (table[0, :, None] for table in rotary(x, torch.arange(context + size)[None]))

    def turned(heads: Tensor, start: int) -> Tensor:
        first, second = heads.chunk(2, -1)
        rows = slice(start, start + len(heads))
        return heads * cos[rows] + torch.cat((-second, first), -1) * sin[rows]

    kinds = config.get("layer_types", ["full_attention"] * config["num_hidden_layers"])
    for layer, kind in enumerate(kinds):

        def w(name: str, layer: int = layer) -> Tensor:
            return tensors[f"layers.{layer}.{name}.weight"]

        def b(name: str, layer: int = layer) -> Tensor | float:
            return tensors.get(f"layers.{layer}.self_attn.{name}.bias", 0.0)

        h = rms(x, w("input_layernorm"))
        both = torch.cat((seen, h))
        q = (h @ w("self_attn.q_proj").T + b("q_proj")).view(size, -1, HEAD_DIM)
        k = (both @ w("self_attn.k_proj").T + b("k_proj")).view(context + size, -1, HEAD_DIM)
        v = (both @ w("self_attn.v_proj").T + b("v_proj")).view(context + size, -1, HEAD_DIM)
        q = turned(rms(q, w("self_attn.q_norm")), context)
        k = turned(rms(k, w("self_attn.k_norm")), 0)
        groups = q.shape[1] // k.shape[1]
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(groups, 1)) / HEAD_DIM**0.5
        own, keys = torch.arange(context, context + size)[:, None], torch.arange(context + size)
        if causal:
            scores = scores.masked_fill(keys > own, float("-inf"))
        if kind == "sliding_attention":
            window = config["sliding_window"]
            hidden = {
                "none": torch.zeros(size, context + size, dtype=torch.bool),
                "sliding": (keys > own) | (keys <= own - window),
                "anchored": (keys > own) | (keys < context - window),
                "anchored, bidirectional": (keys < context - window).expand(size, -1),
            }[rule]
            scores = scores.masked_fill(hidden, float("-inf"))
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(groups, 1))
        x = x + out.reshape(size, -1) @ w("self_attn.o_proj").T + b("o_proj")
        h = rms(x, w("post_attention_layernorm"))
        x = x + (F.silu(h @ w("mlp.gate_proj").T) * (h @ w("mlp.up_proj").T)) @ w("mlp.down_proj").T
    return rms(x, tensors["norm.weight"])


def taps_of(count: int, seed: int = 0, width: int = 3 * HIDDEN) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
