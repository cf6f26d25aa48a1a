"""A random target and draft with a tiny vocabulary, written to disk as people would have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, LAYERS = 16, 2, 1, 8, 24, 3


def _layer(prefix: str, weights: dict[str, torch.Tensor], draw: Any) -> None:
    for name, rows, cols in (
        ("self_attn.q_proj", HEADS * HEAD_DIM, HIDDEN),
        ("self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN),
        ("self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN),
        ("self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM),
        ("mlp.gate_proj", MLP, HIDDEN),
        ("mlp.up_proj", MLP, HIDDEN),
        ("mlp.down_proj", HIDDEN, MLP),
    ):
        weights[f"{prefix}.{name}.weight"] = draw(rows, cols) * 1.5 / cols**0.5
    for name, size in (
        ("self_attn.q_norm", HEAD_DIM),
        ("self_attn.k_norm", HEAD_DIM),
        ("input_layernorm", HIDDEN),
        ("post_attention_layernorm", HIDDEN),
    ):
        weights[f"{prefix}.{name}.weight"] = 1 + draw(size) * 0.2


def _common(vocabulary: int, layers: int) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "layer_types": ["full_attention"] * layers,
        "max_position_embeddings": 64,
        "model_type": "qwen3",
        "num_attention_heads": HEADS,
        "num_hidden_layers": layers,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "vocab_size": vocabulary,
        "eos_token_id": None,
    }


def write_target(path: Path, vocabulary: int, seed: int = 0) -> Path:
    """A Qwen3 target in float64, without a tokenizer."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weights = {
        "model.embed_tokens.weight": draw(vocabulary, HIDDEN),
        "lm_head.weight": draw(vocabulary, HIDDEN) * 0.4,
        "model.norm.weight": 1 + draw(HIDDEN) * 0.2,
    }
    for layer in range(LAYERS):
        _layer(f"model.layers.{layer}", weights, draw)
    path.mkdir(parents=True)
    save_file(weights, path / "model.safetensors")
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "tie_word_embeddings": False,
        **_common(vocabulary, LAYERS),
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


def write_draft(
    path: Path,
    vocabulary: int,
    *,
    head: str = "vanilla",
    block_size: int = 4,
    confidence: bool = True,
    seed: int = 1,
) -> Path:
    """A nested-packaging draft for `write_target`, embeddings and output head from the target."""
    generator = torch.Generator().manual_seed(seed)
    rank, taps = 4, [0, 1]

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weights = {
        "fc.weight": draw(HIDDEN, len(taps) * HIDDEN) / HIDDEN**0.5,
        "hidden_norm.weight": 1 + draw(HIDDEN) * 0.2,
        "norm.weight": 1 + draw(HIDDEN) * 0.2,
        "confidence_head.proj.weight": draw(1, HIDDEN + rank) * 0.5,
        "confidence_head.proj.bias": draw(1),
        "markov_head.markov_w1.weight": draw(vocabulary, rank),
        "markov_head.markov_w2.weight": draw(vocabulary, rank),
    }
    if not confidence:
        del weights["confidence_head.proj.weight"], weights["confidence_head.proj.bias"]
    if head == "none":
        del weights["markov_head.markov_w1.weight"], weights["markov_head.markov_w2.weight"]
    if head == "none" and confidence:
        name = "confidence_head.proj.weight"
        weights[name] = weights[name][:, :HIDDEN].contiguous()
    if head == "gated":
        weights["markov_head.gate_proj.weight"] = draw(rank, HIDDEN + rank)
        weights["markov_head.gate_proj.bias"] = draw(rank)
    elif head == "rnn":
        weights["markov_head.joint_proj.weight"] = draw(3 * rank, 2 * rank + HIDDEN)
        weights["markov_head.joint_proj.bias"] = draw(3 * rank)
    _layer("layers.0", weights, draw)
    path.mkdir(parents=True)
    save_file(weights, path / "model.safetensors")
    config = {
        "architectures": ["DSparkDraftModel"],
        **_common(vocabulary, 1),
        "block_size": block_size,
        "num_target_layers": LAYERS,
        "dflash_config": {
            "mask_token_id": 0,
            "target_layer_ids": taps,
            "enable_confidence_head": confidence,
            "confidence_head_with_markov": head != "none",
            "markov_rank": 0 if head == "none" else rank,
            "markov_head_type": "vanilla" if head == "none" else head,
            "projector_type": "dspark",
        },
    }
    (path / "config.json").write_text(json.dumps(config))
    return path
