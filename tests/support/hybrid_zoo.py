"""Random hybrid targets for tests, at a scale at which a wrong norm, decay, gate or frequency shows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

VOCAB = 53
HYBRID: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.25},
    "eos_token_id": None,
}


def hybrid_config(**changes: Any) -> dict[str, Any]:
    """A small hybrid target's config; a change to None removes the key."""
    config = {**HYBRID, **changes}
    return {key: value for key, value in config.items() if value is not None}


def hybrid_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random float64 tensors under the published names, written down apart from the package's table."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def matrix(name: str, rows: int, columns: int) -> None:
        tensors[f"{name}.weight"] = 1.3 * draw(rows, columns) / columns**0.5

    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head = config.get("head_dim", 256)
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    value_dim = config["linear_value_head_dim"]
    channels = 2 * keys * config["linear_key_head_dim"] + values * value_dim
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        tensors[f"{at}.input_layernorm.weight"] = 0.4 * torch.tanh(draw(hidden))
        tensors[f"{at}.post_attention_layernorm.weight"] = 0.4 * torch.tanh(draw(hidden))
        matrix(f"{at}.mlp.gate_proj", inner, hidden)
        matrix(f"{at}.mlp.up_proj", inner, hidden)
        matrix(f"{at}.mlp.down_proj", hidden, inner)
        interval = config.get("full_attention_interval", 4)
        kinds = config.get("layer_types")
        linear = kinds[layer] == "linear_attention" if kinds else (layer + 1) % interval != 0
        if linear:
            matrix(f"{at}.linear_attn.in_proj_qkv", channels, hidden)
            matrix(f"{at}.linear_attn.in_proj_z", values * value_dim, hidden)
            matrix(f"{at}.linear_attn.in_proj_b", values, hidden)
            matrix(f"{at}.linear_attn.in_proj_a", values, hidden)
            matrix(f"{at}.linear_attn.out_proj", hidden, values * value_dim)
            kernel = config["linear_conv_kernel_dim"]
            tensors[f"{at}.linear_attn.conv1d.weight"] = 0.7 * draw(channels, 1, kernel)
            tensors[f"{at}.linear_attn.A_log"] = draw(values) - 1.5  # decays from almost 1 to 1/2
            tensors[f"{at}.linear_attn.dt_bias"] = 0.5 * draw(values)
            tensors[f"{at}.linear_attn.norm.weight"] = 1 + 0.4 * torch.tanh(draw(value_dim))
        else:
            rows = {"q_proj": 2 * heads * head, "k_proj": kv_heads * head, "v_proj": kv_heads * head}
            for name, size in (*rows.items(), ("o_proj", hidden)):
                matrix(f"{at}.self_attn.{name}", size, heads * head if name == "o_proj" else hidden)
                if config.get("attention_bias", False):
                    tensors[f"{at}.self_attn.{name}.bias"] = 0.5 * draw(size)
            tensors[f"{at}.self_attn.q_norm.weight"] = 0.4 * torch.tanh(draw(head))
            tensors[f"{at}.self_attn.k_norm.weight"] = 0.4 * torch.tanh(draw(head))
    tensors["model.embed_tokens.weight"] = draw(config["vocab_size"], hidden)
    tensors["model.norm.weight"] = 0.4 * torch.tanh(draw(hidden))
    if not config.get("tie_word_embeddings", False):
        matrix("lm_head", config["vocab_size"], hidden)
    return tensors


def write_hybrid(path: Path, seed: int = 0, **changes: Any) -> Path:
    """A random hybrid target's directory, weights in float64."""
    config = hybrid_config(**changes)
    return write(path, config, hybrid_tensors(config, seed))


def write(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """config.json and model.safetensors."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in tensors.items()}, path / "model.safetensors"
    )
    return path


def wrapped(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same model's config inside the multimodal wrapper."""
    text = {
        key: value for key, value in config.items() if key not in ("architectures", "tie_word_embeddings")
    }
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": config["tie_word_embeddings"],
        "text_config": text,
        "image_token_id": 50,
    }


def wrapped_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under the wrapper's names, with a vision tower and an mtp layer beside them."""
    renamed = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: tensor
        for name, tensor in tensors.items()
    }
    return renamed | {
        "model.visual.blocks.0.attn.qkv.weight": torch.zeros(3, 5),
        "model.visual.blocks.0.norm1.weight": torch.zeros(3),
        "mtp.layers.0.input_layernorm.weight": torch.zeros(7),
    }
