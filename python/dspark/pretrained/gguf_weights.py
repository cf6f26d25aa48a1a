"""A Llama model in a GGUF file, read as the tensors and the configuration of the Hugging Face layout."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dspark.errors import CheckpointError
from dspark.layers.parameters import Shape, layer_shapes

if TYPE_CHECKING:
    from gguf import GGUFReader

Array = NDArray[np.float32]

# The storage types of the files that this converter was checked on.
_TYPES = ("F32", "Q4_1", "Q8_0")
_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def require_gguf() -> None:
    """Raises a CheckpointError that says what to install if the `gguf` package is missing."""
    if importlib.util.find_spec("gguf") is None:
        raise CheckpointError("reading a GGUF file needs the package gguf: pip install gguf")


def open_gguf(path: Path) -> GGUFReader:
    """Open `path`; CheckpointError without the `gguf` package, or if the file is not GGUF."""
    require_gguf()
    from gguf import GGUFReader

    try:
        return GGUFReader(path)
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} is not a readable GGUF file: {error}") from error


def field(reader: GGUFReader, key: str, default: Any = None) -> Any:
    """The value of a metadata key; CheckpointError where it is missing and has no default."""
    found = reader.get_field(key)
    if found is not None:
        return found.contents()
    if default is None:
        raise CheckpointError(f"the GGUF file has no metadata key {key}")
    return default


def llama_config(reader: GGUFReader) -> dict[str, Any]:
    """`config.json` of the model: sizes and constants from the metadata, in float32 as they are stored."""
    architecture = field(reader, "general.architecture")
    if architecture != "llama":
        raise CheckpointError(f"the GGUF file holds architecture {architecture!r}, expected 'llama'")
    hidden = field(reader, "llama.embedding_length")
    heads = field(reader, "llama.attention.head_count")
    head_dim = field(reader, "llama.attention.key_length", hidden // heads)
    rotated = field(reader, "llama.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise CheckpointError(f"llama.rope.dimension_count is {rotated}, expected the head size {head_dim}")
    scaling = field(reader, "llama.rope.scaling.type", "none")
    if scaling != "none":
        raise CheckpointError(f"llama.rope.scaling.type is {scaling!r}, expected none")
    names = {tensor.name for tensor in reader.tensors}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": field(reader, "tokenizer.ggml.bos_token_id"),
        "dtype": "float32",
        "eos_token_id": field(reader, "tokenizer.ggml.eos_token_id"),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": field(reader, "llama.feed_forward_length"),
        "max_position_embeddings": field(reader, "llama.context_length"),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": field(reader, "llama.block_count"),
        "num_key_value_heads": field(reader, "llama.attention.head_count_kv", heads),
        # Stored as float32: 9.999999747378752e-06 is 1e-05.
        "rms_norm_eps": _shortest(field(reader, "llama.attention.layer_norm_rms_epsilon")),
        "rope_parameters": {
            "rope_theta": _shortest(field(reader, "llama.rope.freq_base", 10000.0)),
            "rope_type": "default",
        },
        "tie_word_embeddings": "output.weight" not in names,
        "vocab_size": len(field(reader, "tokenizer.ggml.tokens")),
    }


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32."""
    return float(str(np.float32(value)))


def llama_tensors(
    reader: GGUFReader, config: dict[str, Any], progress: Callable[[str], None]
) -> dict[str, Array]:
    """Every weight in float32 under its Hugging Face name; CheckpointError on a missing or unexpected one."""
    expected = _expected_shapes(config)
    tensors: dict[str, Array] = {}
    progress(f"dequantising {len(reader.tensors)} tensors to float32")
    for stored in reader.tensors:
        name = _hugging_face_name(stored.name)
        if name not in expected:
            raise CheckpointError(f"the GGUF file holds {stored.name}, a tensor that no Llama model has")
        weight = dequantise(stored.data, stored.tensor_type.name, stored.name)
        if weight.shape != expected[name]:
            raise CheckpointError(f"{stored.name} has shape {weight.shape}, expected {expected[name]}")
        if name.endswith("q_proj.weight"):
            weight = unpermute(weight, config["num_attention_heads"])
        elif name.endswith("k_proj.weight"):
            weight = unpermute(weight, config["num_key_value_heads"])
        tensors[name] = np.ascontiguousarray(weight)
    missing = sorted(expected.keys() - tensors.keys())
    if missing:
        raise CheckpointError(f"the GGUF file lacks the tensor for {missing[0]} ({len(missing)} missing)")
    return tensors


def dequantise(data: NDArray[Any], kind: str, name: str) -> Array:
    """The float32 values of one stored tensor of type F32, Q4_1 or Q8_0."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    if kind not in _TYPES:
        raise CheckpointError(f"{name} is stored as {kind}; this converter reads {', '.join(_TYPES)}")
    return np.asarray(dequantize(data, GGMLQuantizationType[kind]), dtype=np.float32)


def unpermute(weight: Array, heads: int) -> Array:
    """Puts the rows of q_proj or k_proj from GGUF's order back into Hugging Face's.

    Rotary embedding rotates pairs of a head's rows. GGUF's Llama keeps the two of a pair side by side
    (0, d/2, 1, d/2 + 1, ...), Hugging Face keeps them half a head apart (0, 1, ..., d/2, d/2 + 1, ...).
    Without this, the model still writes text, but badly: a loss of 5.7 instead of 2.8 on English text.
    """
    half = weight.shape[0] // heads // 2
    pairs = weight.reshape(heads, half, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _hugging_face_name(name: str) -> str:
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if layer and layer[2] in _LAYER:
        return f"model.layers.{layer[1]}.{_LAYER[layer[2]]}.weight"
    return _OUTER.get(name, name)


def _expected_shapes(config: dict[str, Any]) -> dict[str, Shape]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    sizes = SimpleNamespace(**config)
    for index in range(config["num_hidden_layers"]):
        shapes |= layer_shapes(
            f"model.layers.{index}.", sizes, qkv_bias=False, output_bias=False, mlp_bias=False, qk_norm=False
        )
    return shapes
