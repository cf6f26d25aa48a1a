"""What `inspect` reports about a target that runs through transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dspark.checkpoint.config_file import ConfigFile
from dspark.errors import CheckpointError
from dspark.target.adapter.config import AdaptedConfig, window
from dspark.target.adapter.names import require_causal
from dspark.target.families import Description

if TYPE_CHECKING:
    from dspark.checkpoint.weights import WeightFiles

SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "layers": "num_hidden_layers",
    "attention_heads": "num_attention_heads",
    "key_value_heads": "num_key_value_heads",
    "head_dim": "head_dim",
}
"""Each size's name here and in a transformers config; null is reported where an architecture has none."""


def _read(config: ConfigFile) -> Any:
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(config.path.parent, local_files_only=True)
    except Exception as error:  # transformers lets any exception of a bad config through
        raise CheckpointError(f"{config.path}: transformers cannot read it ({error})") from error


def read_adapted(config: ConfigFile) -> AdaptedConfig:
    """
    Raises:
        CheckpointError: transformers does not know the architecture, or cannot read the config.
    """
    architecture = require_causal(config)
    return AdaptedConfig.of_text(_read(config).get_text_config(decoder=True), architecture)


def describe_adapted(config: ConfigFile, weights: WeightFiles) -> Description:
    """
    Raises:
        CheckpointError: transformers does not know the architecture, or cannot read the config.
    """
    import transformers

    architecture = require_causal(config)
    read = _read(config)
    text = read.get_text_config(decoder=True)
    length, limit = window(text, architecture)
    facts: dict[str, Any] = {
        "architecture": architecture,
        "runs_through": f"transformers {transformers.__version__}",
        "tied_embeddings": bool(getattr(read, "tie_word_embeddings", False)),
        **{ours: getattr(text, theirs, None) for ours, theirs in SIZES.items()},
        "max_position_embeddings": length,
    }
    notes = ["tensors and cache are checked by loading, not here"]
    return Description(facts, set(weights.tensors), notes=notes if limit is None else [*notes, limit])
