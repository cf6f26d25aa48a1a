"""Small random models of transformers without native code here, as people would have them on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from model_zoo import random_tensor
from random_pair import HIDDEN, LAYERS

VOCAB = 13
WINDOW = 5

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GPT2: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": HIDDEN,
    "n_layer": LAYERS,
    "n_head": 2,
    "n_positions": 128,
    "bos_token_id": None,
    "eos_token_id": None,
}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", _GPT2),
    "gpt_neox": ("GPTNeoXForCausalLM", {**_COMMON, "rotary_pct": 0.5}),
    "mistral-window": ("MistralForCausalLM", {**_COMMON, "sliding_window": WINDOW}),
    "phi3": ("Phi3ForCausalLM", {**_COMMON, "original_max_position_embeddings": 128}),
    "gemma2": (
        "Gemma2ForCausalLM",
        {
            **_COMMON,
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": WINDOW,
            "final_logit_softcapping": 3.0,
            "attn_logit_softcapping": 5.0,
        },
    ),
    "cohere": ("CohereForCausalLM", {**_COMMON, "logit_scale": 0.25}),
    "granite": ("GraniteForCausalLM", {**_COMMON, "logits_scaling": 4.0, "residual_multiplier": 0.5}),
    "mixtral-float32": ("MixtralForCausalLM", {**_COMMON, "num_local_experts": 3, "num_experts_per_tok": 2}),
    "bloom": (
        "BloomForCausalLM",
        {
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "n_layer": LAYERS,
            "n_head": 2,
            "seq_length": 128,
            "bos_token_id": None,
            "eos_token_id": None,
        },
    ),
}
"""Learned positions, partial rotary, sliding windows, fused projections, soft-capping, factors on logits,
experts (which transformers 5.x multiplies in float32 at most), position biases."""

DTYPE = {kind: torch.float32 if kind.endswith("float32") else torch.float64 for kind in KINDS}
EXACT = {torch.float64: 1e-10, torch.float32: 1e-4}


def build(kind: str, seed: int = 0, **changes: Any) -> Any:
    """The model itself, in float64."""
    name, sizes = KINDS[kind]
    return randomised(getattr(transformers, name), {**sizes, **changes}, seed)


def randomised(model_class: Any, sizes: dict[str, Any], seed: int = 0) -> Any:
    """A model with weights of a scale at which every part of it shows."""
    model = model_class(model_class.config_class(**sizes)).to(torch.float64).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_drawn(name, parameter, generator))
    return model


def write(path: Path, kind: str, seed: int = 0, **changes: Any) -> Path:
    """A checkpoint directory with float64 weights, without a tokenizer."""
    build(kind, seed, **changes).save_pretrained(path)
    return path


def _drawn(name: str, parameter: Tensor, generator: torch.Generator) -> Tensor:
    shape = tuple(parameter.shape)
    if name.endswith("bias"):
        return random_tensor("bias", shape, generator)
    if parameter.dim() == 1:
        return random_tensor("norm", shape, generator)
    return random_tensor("embed" if "wte" in name or "wpe" in name else name, shape, generator)
