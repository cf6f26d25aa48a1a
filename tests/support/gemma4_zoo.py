"""Random Gemma 4 targets and drafts as transformers and DeepSpec store them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.models.gemma4 import Gemma4Config, Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4ForCausalLM, Gemma4ForConditionalGeneration
from transformers.models.gemma4_unified import Gemma4UnifiedConfig, Gemma4UnifiedTextConfig
from transformers.models.gemma4_unified.modeling_gemma4_unified import (
    Gemma4UnifiedForCausalLM,
    Gemma4UnifiedForConditionalGeneration,
)

from model_zoo import random_tensor, write_checkpoint

VOCAB, HIDDEN, INNER, HEADS = 61, 32, 40, 4
WINDOW = 5
SLIDING_HEAD, FULL_HEAD = 8, 16
SLIDING, FULL = "sliding_attention", "full_attention"

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 5,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": SLIDING_HEAD,
    "global_head_dim": FULL_HEAD,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": WINDOW,
    "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
    "final_logit_softcapping": 3.0,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 100.0},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000.0},
    },
}
"""The published spelling; short periods, so that a wrong rotation shows within few positions."""


def random_state(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """Scalars between 0.5 and 1.5, embeddings of std 1 / sqrt(hidden), the rest as in `random_tensor`."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in sorted(shapes.items()):
        tensor = random_tensor(name, shape, generator)
        if name.endswith("layer_scalar"):
            tensor = 1.0 + 0.5 * torch.tanh(tensor)
        elif "embed_tokens" in name:
            tensor = tensor / shape[-1] ** 0.5
        state[name] = tensor
    return state


def their_model(architecture: str, **changes: Any) -> torch.nn.Module:
    """transformers' model with random weights in float64."""
    text = {**TEXT, **changes}
    if architecture == "Gemma4ForCausalLM":
        model = Gemma4ForCausalLM(Gemma4TextConfig(**text, hidden_size_per_layer_input=0))
    elif architecture == "Gemma4ForConditionalGeneration":
        model = Gemma4ForConditionalGeneration(
            Gemma4Config(text_config={**text, "hidden_size_per_layer_input": 0}, vision_config=None)
        )
    elif architecture == "Gemma4UnifiedForCausalLM":
        model = Gemma4UnifiedForCausalLM(Gemma4UnifiedTextConfig(**text))
    else:
        config = Gemma4UnifiedConfig(
            text_config=text, tie_word_embeddings=text.get("tie_word_embeddings", True)
        )
        model = Gemma4UnifiedForConditionalGeneration(config)
    model = model.to(torch.float64).eval()
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if text.get("tie_word_embeddings", True):
        del shapes["lm_head.weight"]
    model.load_state_dict(random_state(shapes, 0), strict=False)
    model.tie_weights()
    return model


def write_theirs(path: Path, model: torch.nn.Module) -> Path:
    """As `save_pretrained` writes it."""
    model.save_pretrained(path)
    return path


def published_config(architecture: str, **changes: Any) -> dict[str, Any]:
    """A target's config in the published spelling; a change to None removes the key."""
    text = {key: value for key, value in {**TEXT, **changes}.items() if value is not None}
    if architecture.endswith("ForConditionalGeneration"):
        return {
            "architectures": [architecture],
            "model_type": "gemma4_unified",
            "text_config": {**text, "model_type": "gemma4_unified_text"},
        }
    return {"architectures": [architecture], "model_type": "gemma4_unified_text", **text}


def write_target(
    path: Path, architecture: str = "Gemma4UnifiedForConditionalGeneration", **changes: Any
) -> Path:
    """A random target in the published spelling."""
    model = their_model(architecture, **changes)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    if not changes.get("tie_word_embeddings", True):
        tensors["lm_head.weight"] = model.state_dict()["lm_head.weight"]
    return write_checkpoint(path, published_config(architecture, **changes), tensors)


DRAFT: dict[str, Any] = {
    **{key: value for key, value in TEXT.items() if key not in ("layer_types", "rope_parameters")},
    "architectures": ["Gemma4DSparkModel"],
    "model_type": "gemma4_text",
    "layer_types": [FULL, FULL],
    "num_hidden_layers": 2,
    "num_target_layers": 5,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": False,
    "tie_word_embeddings": False,
    "rope_parameters": {**TEXT["rope_parameters"], "rope_theta": None, "rope_type": "default"},
    "block_size": 5,
    "mask_token_id": 4,
    "num_anchors": 4,
    "target_layer_ids": [0, 1, 3],
    "markov_rank": 5,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
"""As DeepSpec writes it: the target's text config with the switches beside it."""


def draft_config(**changes: Any) -> dict[str, Any]:
    """A draft's config; a change to None removes the key."""
    return {key: value for key, value in {**DRAFT, **changes}.items() if value is not None}


def draft_tensors(config: Mapping[str, Any], seed: int = 1) -> dict[str, Tensor]:
    """Random draft tensors in float64 under the published names."""
    vocab, rank = config["vocab_size"], config["markov_rank"]
    shared = config["attention_k_eq_v"]
    keys = FULL_HEAD * (config["num_global_key_value_heads"] if shared else config["num_key_value_heads"])
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, len(config["target_layer_ids"]) * HIDDEN),
        "hidden_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
        "embed_tokens.weight": (vocab, HIDDEN),
        "lm_head.weight": (vocab, HIDDEN),
        "markov_head.markov_w1.weight": (vocab, rank),
        "markov_head.markov_w2.weight": (vocab, rank),
        "confidence_head.proj.weight": (1, HIDDEN + rank),
        "confidence_head.proj.bias": (1,),
    }
    if config["markov_head_type"] == "rnn":
        shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + HIDDEN)
        shapes["markov_head.joint_proj.bias"] = (3 * rank,)
    for layer in range(config["num_hidden_layers"]):
        products = {"q": (HEADS * FULL_HEAD, HIDDEN), "k": (keys, HIDDEN), "o": (HIDDEN, HEADS * FULL_HEAD)}
        if not shared:
            products["v"] = (keys, HIDDEN)
        for name, shape in products.items():
            shapes[f"layers.{layer}.self_attn.{name}_proj.weight"] = shape
        for name in ("q_norm", "k_norm"):
            shapes[f"layers.{layer}.self_attn.{name}.weight"] = (FULL_HEAD,)
        for name, shape in {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}.items():
            shapes[f"layers.{layer}.mlp.{name}_proj.weight"] = shape
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            shapes[f"layers.{layer}.{name}_layernorm.weight"] = (HIDDEN,)
        shapes[f"layers.{layer}.layer_scalar"] = (1,)
    return random_state(shapes, seed)


def write_draft(path: Path, seed: int = 1, **changes: Any) -> Path:
    """A random draft's directory, weights in float64."""
    config = draft_config(**changes)
    return write_checkpoint(path, config, draft_tensors(config, seed))
