"""The configuration of a hybrid target; the text part where the checkpoint is multimodal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.checkpoint.config_file import MOST_LAYERS, ConfigFile, boolean
from dspark.checkpoint.rope import RopeConfig, read_rope
from dspark.errors import CheckpointError
from dspark.target.config import attention_sizes
from dspark.target.families import architecture_of, family_of

LINEAR, FULL = "linear_attention", "full_attention"
DEFAULT_HEAD_DIM = 256
DEFAULT_INTERVAL = 4
DEFAULT_ROTATING_PART = 0.25
"""The defaults of keys that a config may lack, as in transformers."""

SILU_NAMES = ("swish", "silu")
"""Two names of the function that gates the heads of a Gated-DeltaNet layer (`output_gate_type`)."""

DELTA_DEFAULTS = {
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_conv_kernel_dim": 4,
}


@dataclass(frozen=True)
class DeltaSizes:
    """Sizes of the Gated-DeltaNet layers. Each key head serves `groups` consecutive value heads."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def groups(self) -> int:
        return self.value_heads // self.key_heads

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def values(self) -> int:
        """Width of all value heads."""
        return self.value_heads * self.value_dim


@dataclass(frozen=True)
class HybridConfig:
    """Sizes in elements, positions in tokens; `is_linear[l]`: whether layer l is a Gated-DeltaNet."""

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
    attention_bias: bool
    rope: RopeConfig
    rotary_dim: int
    """Entries of each head that are rotated; the others stay as they are."""
    is_linear: tuple[bool, ...]
    delta: DeltaSizes

    @property
    def attention_layers(self) -> int:
        return self.num_hidden_layers - self.linear_layers

    @property
    def linear_layers(self) -> int:
        return sum(self.is_linear)

    @classmethod
    def from_directory(cls, path: Path) -> HybridConfig:
        """Reads `config.json` of a checkpoint directory."""
        return cls.from_file(ConfigFile.read(path / "config.json"))

    @classmethod
    def from_file(cls, config: ConfigFile) -> HybridConfig:
        """
        Raises:
            CheckpointError: another architecture, or values that this one does not support.
        """
        architecture = architecture_of(config, family_of(config))
        text = config.inside("text_config") or config
        for part in (config, text):
            _refuse_unsupported(part)
        heads = attention_sizes(text, DEFAULT_HEAD_DIM)
        layers = text.integer("num_hidden_layers")
        rope, rotary_dim = _rotation(text, heads["head_dim"])
        return cls(
            architecture=architecture,
            vocab_size=text.integer("vocab_size"),
            intermediate_size=text.integer("intermediate_size"),
            num_hidden_layers=layers,
            max_position_embeddings=text.integer("max_position_embeddings"),
            rms_norm_eps=text.positive_number("rms_norm_eps", 1e-6),
            tie_word_embeddings=_tied(config, text),
            attention_bias=text.flag("attention_bias", False),
            rope=rope,
            rotary_dim=rotary_dim,
            is_linear=_linear_layers(text, layers),
            delta=_delta_sizes(text),
            **heads,
        )


def _refuse_unsupported(config: ConfigFile) -> None:
    config.refuse_quantised()
    if (activation := config.text("hidden_act", "silu")) != "silu":
        raise config.wrong("hidden_act", "'silu'", activation)
    if not config.flag("attn_output_gate", True):
        raise config.wrong("attn_output_gate", "true: attention without its gate is not supported", False)
    if (gate := config.text("output_gate_type", "silu")) not in SILU_NAMES:
        raise config.wrong("output_gate_type", " or ".join(map(repr, SILU_NAMES)), gate)


def _tied(config: ConfigFile, text: ConfigFile) -> bool:
    places: list[tuple[str, Any]] = [("tie_word_embeddings", config.raw("tie_word_embeddings"))]
    if text is not config:
        key = "tie_word_embeddings"
        places.append((f"{text.prefix}{key}", text.raw(key)))
    return bool(config.agreed(places, boolean, "true or false"))


def _linear_layers(config: ConfigFile, layers: int) -> tuple[bool, ...]:
    if layers > MOST_LAYERS:
        raise config.wrong("num_hidden_layers", f"at most {MOST_LAYERS}", layers)
    kinds = config.raw("layer_types")
    if kinds is None:
        interval = config.optional_integer("full_attention_interval") or DEFAULT_INTERVAL
        if layers < interval:
            expected = f"at least {interval}, every {interval}th layer being one of full attention"
            raise config.wrong("num_hidden_layers", expected, layers)
        return tuple((layer + 1) % interval != 0 for layer in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise config.wrong("layer_types", f"a list of {layers} entries, one for each layer", kinds)
    unknown = sorted({str(kind) for kind in kinds} - {LINEAR, FULL})
    if unknown:
        raise config.wrong("layer_types", f"{LINEAR} or {FULL}", ", ".join(unknown))
    if FULL not in kinds:
        raise config.wrong("layer_types", f"at least one {FULL}", kinds)
    return tuple(kind == LINEAR for kind in kinds)


def _delta_sizes(config: ConfigFile) -> DeltaSizes:
    size = {key: config.optional_integer(key) or default for key, default in DELTA_DEFAULTS.items()}
    keys, values = size["linear_num_key_heads"], size["linear_num_value_heads"]
    if values % keys:
        raise CheckpointError(
            f"{config.path}: {config.prefix}linear_num_value_heads {values} is not a multiple of "
            f"linear_num_key_heads {keys}"
        )
    return DeltaSizes(
        key_heads=keys,
        value_heads=values,
        key_dim=size["linear_key_head_dim"],
        value_dim=size["linear_value_head_dim"],
        kernel=size["linear_conv_kernel_dim"],
    )


def _rotation(config: ConfigFile, head_dim: int) -> tuple[RopeConfig, int]:
    """The rotation, and how many entries of a head it rotates. For text, the three grids of multimodal
    positions are the same, so `mrope_section` does not matter."""
    key = "partial_rotary_factor"
    values = dict(config.values)
    places = [(key, values.pop(key, None))]
    for block in ("rope_parameters", "rope_scaling"):
        inner = config.object(block)
        if inner is not None:
            places.append((f"{block}.{key}", inner.get(key)))
            values[block] = {name: value for name, value in inner.items() if name != key}
    part = config.agreed(places, _fraction, "a number above 0, at most 1")
    rotary_dim = int(head_dim * (DEFAULT_ROTATING_PART if part is None else part))
    if rotary_dim < 2 or rotary_dim % 2:
        raise CheckpointError(
            f"{config.path}: {config.prefix}{key} {part} of head_dim {head_dim} makes {rotary_dim} rotating "
            "entries; rotary embedding needs pairs"
        )
    return read_rope(ConfigFile(config.path, values, config.prefix)), rotary_dim


def _fraction(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0.0 < value <= 1.0 else None
