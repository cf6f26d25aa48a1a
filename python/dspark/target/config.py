"""The configuration of a dense target: Llama, Qwen2, Qwen3."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from dspark.checkpoint.config_file import ConfigFile
from dspark.checkpoint.rope import RopeConfig, read_rope
from dspark.errors import CheckpointError
from dspark.target.families import architecture_of, family_of

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
"""The supported architectures, each with its `model_type`."""


@dataclass(frozen=True)
class TargetConfig:
    """Sizes in elements, positions in tokens; `windows[l]` is layer l's sliding window or None."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig
    windows: tuple[int | None, ...]

    @classmethod
    def from_directory(cls, path: Path) -> TargetConfig:
        """Reads `config.json` of a checkpoint directory."""
        return cls.from_file(ConfigFile.read(path / "config.json"))

    @classmethod
    def from_file(cls, config: ConfigFile) -> TargetConfig:
        """
        Raises:
            CheckpointError: another architecture, or values that this one does not support.
        """
        architecture = architecture_of(config, family_of(config))
        family = ARCHITECTURES.get(architecture)
        if family is None:
            raise config.wrong("architectures", f"one of {', '.join(ARCHITECTURES)}", architecture)
        config.refuse_quantised()
        activation = config.text("hidden_act", "silu")
        if activation != "silu":
            raise CheckpointError(f"{config.path}: hidden_act is {activation!r}; only 'silu' is supported")
        layers = config.integer("num_hidden_layers")
        bias = config.flag("attention_bias", family == "qwen2")
        return cls(
            architecture=architecture,
            vocab_size=config.integer("vocab_size"),
            intermediate_size=config.integer("intermediate_size"),
            num_hidden_layers=layers,
            max_position_embeddings=config.integer("max_position_embeddings"),
            rms_norm_eps=config.positive_number("rms_norm_eps", 1e-6),
            tie_word_embeddings=config.flag("tie_word_embeddings", False),
            qkv_bias=True if family == "qwen2" else bias,
            output_bias=False if family == "qwen2" else bias,
            mlp_bias=config.flag("mlp_bias", False) if family == "llama" else False,
            qk_norm=family == "qwen3",
            rope=read_rope(config),
            windows=(None,) * layers if family == "llama" else config.layer_windows(layers),
            **attention_sizes(config, QWEN3_HEAD_DIM if family == "qwen3" else None),
        )


class AttentionSizes(TypedDict):
    """The sizes that every attention layer of a model shares."""

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int


QWEN3_HEAD_DIM = 128
"""The head size of a Qwen3 config without `head_dim`."""


def attention_sizes(config: ConfigFile, head_dim: int | None = None) -> AttentionSizes:
    """hidden_size, num_attention_heads, num_key_value_heads and head_dim, with the usual defaults,
    checked."""
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    kv_heads = config.optional_integer("num_key_value_heads") or heads
    if heads % kv_heads:
        raise CheckpointError(
            f"{config.path}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    head_dim = config.optional_integer("head_dim") or head_dim
    if head_dim is None:
        if hidden % heads:
            raise CheckpointError(
                f"{config.path}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}, "
                "and head_dim is missing"
            )
        head_dim = hidden // heads
    if head_dim % 2:
        raise CheckpointError(f"{config.path}: head_dim {head_dim} is odd; rotary embedding needs pairs")
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }
