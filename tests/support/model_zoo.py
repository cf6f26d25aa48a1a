"""Random checkpoints for tests, with weights of a scale at which a wrong norm, bias or frequency shows.

The default initialisation (std 0.02, norms 1, biases 0) hides all of these.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

VOCAB = 61
HIDDEN = 32
HEAD_DIM = 8

TARGET: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
FAMILIES = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": HEAD_DIM},
}


def random_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Norms 1 +- 0.5, biases of std 0.5, matrices of std 1.5 / sqrt(inputs), embeddings of std 1."""
    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    if "norm" in name:
        return 1.0 + 0.5 * torch.tanh(noise)
    if name.endswith("bias"):
        return 0.5 * noise
    if "embed" in name or "markov_w1" in name:
        return noise
    return 1.5 * noise / shape[-1] ** 0.5


def target_config(family: str, **changes: Any) -> dict[str, Any]:
    """A small target's config; a change to None removes the key."""
    config = {**TARGET, **FAMILIES[family], **changes}
    return {key: value for key, value in config.items() if value is not None}


def write_checkpoint(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """config.json and model.safetensors."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in tensors.items()}, path / "model.safetensors"
    )
    return path


def target_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random tensors in float64 under the published names."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head = config.get("head_dim", hidden // heads)
    family = config["model_type"]
    bias = family == "qwen2" or config.get("attention_bias", False)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.get("tie_word_embeddings", False):
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= _layer(
            prefix, hidden, inner, heads * head, kv_heads * head, head, qk_norm=family == "qwen3"
        )
        if bias:
            sizes = {"q": heads * head, "k": kv_heads * head, "v": kv_heads * head}
            if family != "qwen2":
                sizes["o"] = hidden
            shapes |= {f"{prefix}self_attn.{name}_proj.bias": (size,) for name, size in sizes.items()}
        if config.get("mlp_bias", False):
            for name, size in (("gate", inner), ("up", inner), ("down", hidden)):
                shapes[f"{prefix}mlp.{name}_proj.bias"] = (size,)
    return _draw(shapes, seed)


def write_target(path: Path, family: str, seed: int = 0, **changes: Any) -> Path:
    """A random target's directory, weights in float64."""
    config = target_config(family, **changes)
    return write_checkpoint(path, config, target_tensors(config, seed))


DRAFT_SWITCHES: dict[str, Any] = {
    "mask_token_id": 3,
    "target_layer_ids": [0, 1, 2],
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "markov_rank": 5,
    "markov_head_type": "vanilla",
}
DRAFT: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "num_target_layers": 4,
    "block_size": 5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def flat_config(**changes: Any) -> dict[str, Any]:
    """A flat draft's config; a change to None removes the key."""
    config = {**DRAFT, **DRAFT_SWITCHES, "architectures": ["Qwen3DSparkModel"], "num_anchors": 4, **changes}
    return {key: value for key, value in config.items() if value is not None}


def nested_config(switches: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A nested draft's config; `switches` change `dflash_config`."""
    nested = {**DRAFT_SWITCHES, "projector_type": "dspark", **(switches or {})}
    config = {**DRAFT, "architectures": ["DSparkDraftModel"], "dflash_config": nested, **changes}
    config["dflash_config"] = {key: value for key, value in nested.items() if value is not None}
    if changes.get("dflash_config", nested) is None:
        del config["dflash_config"]
    return {key: value for key, value in config.items() if value is not None}


def draft_tensors(
    *,
    own: bool,
    kind: str | None = "vanilla",
    rank: int = 5,
    confidence: int | None = HIDDEN + 5,
    taps: int = 3,
    layers: int = 2,
    bias: bool = False,
    seed: int = 1,
) -> dict[str, Tensor]:
    """Random draft tensors. `own`: embeddings and head; `confidence`: width of the confidence weight."""
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, taps * HIDDEN),
        "hidden_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
    }
    for layer in range(layers):
        shapes |= _layer(f"layers.{layer}.", HIDDEN, 40, 32, 16, HEAD_DIM, qk_norm=True)
        if bias:
            for name, size in {"q": 32, "k": 16, "v": 16, "o": HIDDEN}.items():
                shapes[f"layers.{layer}.self_attn.{name}_proj.bias"] = (size,)
    if own:
        shapes |= {"embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
    if kind is not None:
        shapes |= {
            "markov_head.markov_w1.weight": (VOCAB, rank),
            "markov_head.markov_w2.weight": (VOCAB, rank),
        }
    if kind == "gated":
        shapes |= {
            "markov_head.gate_proj.weight": (rank, HIDDEN + rank),
            "markov_head.gate_proj.bias": (rank,),
        }
    if kind == "rnn":
        shapes |= {
            "markov_head.joint_proj.weight": (3 * rank, 2 * rank + HIDDEN),
            "markov_head.joint_proj.bias": (3 * rank,),
        }
    if confidence is not None:
        shapes |= {"confidence_head.proj.weight": (1, confidence), "confidence_head.proj.bias": (1,)}
    return _draw(shapes, seed)


def _layer(
    prefix: str, hidden: int, inner: int, queries: int, keys: int, head: int, *, qk_norm: bool
) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}self_attn.q_proj.weight": (queries, hidden),
        f"{prefix}self_attn.k_proj.weight": (keys, hidden),
        f"{prefix}self_attn.v_proj.weight": (keys, hidden),
        f"{prefix}self_attn.o_proj.weight": (hidden, queries),
        f"{prefix}mlp.gate_proj.weight": (inner, hidden),
        f"{prefix}mlp.up_proj.weight": (inner, hidden),
        f"{prefix}mlp.down_proj.weight": (hidden, inner),
        f"{prefix}input_layernorm.weight": (hidden,),
        f"{prefix}post_attention_layernorm.weight": (hidden,),
    }
    if qk_norm:
        shapes[f"{prefix}self_attn.q_norm.weight"] = (head,)
        shapes[f"{prefix}self_attn.k_norm.weight"] = (head,)
    return shapes


def _draw(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: random_tensor(name, shape, generator) for name, shape in shapes.items()}
