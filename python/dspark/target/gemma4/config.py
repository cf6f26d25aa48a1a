"""The configuration of a Gemma 4 text model, from either spelling of its config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.checkpoint.config_file import ConfigFile, positive_integer
from dspark.checkpoint.rope import RopeConfig
from dspark.errors import CheckpointError
from dspark.target.gemma4.rotation import FULL, SLIDING, read_rotation

ARCHITECTURES = {
    "Gemma4UnifiedForCausalLM": False,
    "Gemma4UnifiedForConditionalGeneration": True,
    "Gemma4ForCausalLM": False,
    "Gemma4ForConditionalGeneration": True,
}
"""Each architecture, and whether it wraps the text model (`text_config`, prefixed tensor names)."""

PLACEHOLDERS = {"image_token_id": 258_880, "video_token_id": 258_884, "audio_token_id": 258_881}
"""The token ids that apply where a key is missing."""

PATTERN = 6
"""Without `layer_types` every sixth layer is full."""


@dataclass(frozen=True)
class KindHeads:
    """Heads of the layers of one kind. `shared_values`: there is no v_proj, values come from k_proj."""

    head_dim: int
    num_key_value_heads: int
    shared_values: bool


@dataclass(frozen=True)
class Gemma4Config:
    """Sizes in elements, positions in tokens; `kinds[l]` is "sliding_attention" or "full_attention"."""

    architecture: str
    prefix: str
    """Start of the names of the text model's tensors: `model.` or `model.language_model.`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    final_logit_softcapping: float | None
    sliding_window: int
    kinds: tuple[str, ...]
    heads: Mapping[str, KindHeads]
    ropes: Mapping[str, RopeConfig]
    placeholders: Mapping[int, int]
    """A wrapped model's tokens for images, sound and video, each with the token whose embedding it gets."""

    @classmethod
    def from_directory(cls, path: Path, architecture: str) -> Gemma4Config:
        """Reads `config.json` of a checkpoint directory."""
        return cls.from_file(ConfigFile.read(path / "config.json"), architecture)

    @classmethod
    def from_file(cls, file: ConfigFile, architecture: str) -> Gemma4Config:
        """
        Raises:
            CheckpointError: a variant that is not supported, or values that contradict each other.
        """
        wrapped = ARCHITECTURES[architecture]
        config = _text_config(file) if wrapped else file
        refuse_variants(config, per_layer_inputs=256 if architecture.startswith("Gemma4For") else 0)
        file.refuse_quantised()
        config.refuse_quantised()
        kinds = read_kinds(config)
        heads = read_heads_by_kind(config, kinds)
        return cls(
            architecture=architecture,
            prefix="model.language_model." if wrapped else "model.",
            vocab_size=config.integer("vocab_size"),
            hidden_size=config.integer("hidden_size"),
            intermediate_size=config.integer("intermediate_size"),
            num_hidden_layers=len(kinds),
            num_attention_heads=config.integer("num_attention_heads"),
            max_position_embeddings=config.integer("max_position_embeddings"),
            rms_norm_eps=config.positive_number("rms_norm_eps", 1e-6),
            tie_word_embeddings=_tied(file, config),
            attention_bias=config.flag("attention_bias", False),
            final_logit_softcapping=read_softcap(config),
            sliding_window=config.integer("sliding_window") if SLIDING in kinds else 0,
            kinds=kinds,
            heads=heads,
            ropes={kind: read_rotation(config, kind) for kind in heads},
            placeholders=_placeholders(file, config) if wrapped else {},
        )

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Each layer's window, or None for a full layer."""
        return tuple(self.sliding_window if kind == SLIDING else None for kind in self.kinds)


def refuse_variants(config: ConfigFile, per_layer_inputs: int = 0) -> None:
    """Raises `CheckpointError` for features of Gemma 4 models that are not implemented here.

    `per_layer_inputs`: the default of `hidden_size_per_layer_input`.
    """

    def refuse(what: str) -> CheckpointError:
        return CheckpointError(f"{config.path}: {what}, which is not supported")

    if config.flag("enable_moe_block", False):
        raise refuse("enable_moe_block is true: a mixture of experts")
    if size := config.values.get("hidden_size_per_layer_input", per_layer_inputs):
        raise refuse(f"hidden_size_per_layer_input is {size}: embeddings for every layer")
    if shared := config.raw("num_kv_shared_layers"):
        raise refuse(f"num_kv_shared_layers is {shared}: layers that reuse the keys and values of others")
    if config.raw("use_bidirectional_attention") == "all":
        raise refuse("use_bidirectional_attention is 'all': not a causal model")
    activation = config.text("hidden_activation", "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        raise refuse(f"hidden_activation is {activation!r} instead of 'gelu_pytorch_tanh'")


def read_kinds(config: ConfigFile) -> tuple[str, ...]:
    """The kind of each layer."""
    layers = config.integer("num_hidden_layers")
    kinds = config.raw("layer_types")
    if kinds is None:
        kinds = [FULL if layer % PATTERN == PATTERN - 1 else SLIDING for layer in range(layers - 1)] + [FULL]
    if not isinstance(kinds, list) or len(kinds) != layers or set(map(str, kinds)) - {SLIDING, FULL}:
        raise config.wrong("layer_types", f"a list of {layers} entries, {SLIDING} or {FULL}", kinds)
    if kinds[-1] != FULL:
        raise config.wrong("layer_types", f"a list that ends with {FULL}, as every Gemma 4 does", kinds)
    return tuple(kinds)


def read_heads_by_kind(config: ConfigFile, kinds: tuple[str, ...]) -> dict[str, KindHeads]:
    """Head sizes of every kind that occurs: as published (`global_head_dim`, `num_global_key_value_heads`),
    or as transformers writes them since 5.24 (`per_layer_config`)."""
    shared = config.flag("attention_k_eq_v", False)
    overrides = _overrides(config)
    sizes: dict[str, KindHeads] = {}
    for layer, kind in enumerate(kinds):
        if overrides is None:
            found = _published(config, kind, shared)
        else:
            found = _per_layer(config, overrides, layer, shared and kind == FULL)
        if sizes.setdefault(kind, found) != found:
            raise CheckpointError(
                f"{config.path}: per_layer_config gives layer {layer} other heads than the {kind} layers "
                f"before it ({found} after {sizes[kind]}), which is not supported"
            )
    if overrides is not None and FULL in sizes:
        _check_both_spellings(config, sizes[FULL])
    return sizes


def read_softcap(config: ConfigFile) -> float | None:
    """The cap c in c tanh(logits / c), or None if logits are not capped."""
    if config.raw("final_logit_softcapping") is None:
        return None
    cap = config.number("final_logit_softcapping", 0.0)
    if cap <= 0.0:
        raise config.wrong("final_logit_softcapping", "a positive number or null", cap)
    return cap


def _published(config: ConfigFile, kind: str, shared: bool) -> KindHeads:
    kv_heads = config.integer("num_key_value_heads")
    if kind == SLIDING:
        return _checked(config, config.integer("head_dim"), kv_heads, False)
    if shared:
        kv_heads = config.optional_integer("num_global_key_value_heads") or kv_heads
    return _checked(config, config.optional_integer("global_head_dim") or 512, kv_heads, shared)


def _overrides(config: ConfigFile) -> dict[int, Any] | None:
    """`per_layer_config` by layer; its keys are numbers with leading zeros ("05")."""
    found = config.object("per_layer_config")
    if found is None:
        return None
    layers = config.integer("num_hidden_layers")
    if not all(key.isdecimal() and int(key) < layers for key in found):
        raise config.wrong("per_layer_config", f"an object with keys from 0 to {layers - 1}", sorted(found))
    return {int(key): own for key, own in found.items()}


def _per_layer(config: ConfigFile, overrides: dict[int, Any], layer: int, shared: bool) -> KindHeads:
    own = overrides.get(layer, {})
    if not isinstance(own, dict) or set(own) - {"head_dim", "num_key_value_heads"}:
        raise config.wrong(f"per_layer_config.{layer}", "head_dim and num_key_value_heads", own)

    def size(key: str) -> int:
        place = f"per_layer_config.{layer}.{key}"
        found = config.agreed([(place, own.get(key))], positive_integer, "a positive integer")
        return found or config.integer(key)

    return _checked(config, size("head_dim"), size("num_key_value_heads"), shared)


def _checked(config: ConfigFile, head_dim: int, kv_heads: int, shared: bool) -> KindHeads:
    heads = config.integer("num_attention_heads")
    if heads % kv_heads:
        raise CheckpointError(
            f"{config.path}: num_attention_heads {heads} is not a multiple of {kv_heads} key and value heads"
        )
    if head_dim % 2:
        raise CheckpointError(f"{config.path}: head size {head_dim} is odd; rotary embedding needs pairs")
    return KindHeads(head_dim, kv_heads, shared)


def _check_both_spellings(config: ConfigFile, found: KindHeads) -> None:
    for key, value in (
        ("global_head_dim", found.head_dim),
        ("num_global_key_value_heads", found.num_key_value_heads),
    ):
        said = config.optional_integer(key)
        if said is not None and said != value:
            raise CheckpointError(
                f"{config.path}: {key} is {said} but per_layer_config says {value}; they must be equal"
            )


def _text_config(file: ConfigFile) -> ConfigFile:
    text = file.inside("text_config")
    if text is None:
        raise CheckpointError(f"{file.path}: text_config is missing, which this architecture needs")
    return text


def _placeholders(file: ConfigFile, config: ConfigFile) -> dict[int, int]:
    """Maps each placeholder to the padding token: where there is no image, the wrapper embeds it as this."""
    padding = config.values.get("pad_token_id", 0)
    tokens = [file.values.get(key, default) for key, default in PLACEHOLDERS.items()]
    for name, value in (("pad_token_id", padding), *zip(PLACEHOLDERS, tokens, strict=True)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            raise file.wrong(name, "a token id or null", value)
    vocabulary = config.integer("vocab_size")
    if padding is None or padding >= vocabulary:
        return {}
    return {token: padding for token in tokens if token is not None and token < vocabulary}


def _tied(file: ConfigFile, config: ConfigFile) -> bool:
    """The wrapper's `tie_word_embeddings`, else the text model's, else true."""
    return file.flag("tie_word_embeddings", config.flag("tie_word_embeddings", True))
