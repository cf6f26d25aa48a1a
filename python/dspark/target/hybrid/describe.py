"""What `inspect` reports about a hybrid target."""

from __future__ import annotations

import dataclasses

from dspark.checkpoint.config_file import ConfigFile
from dspark.checkpoint.weights import WeightFiles
from dspark.target.families import Description
from dspark.target.hybrid.config import HybridConfig
from dspark.target.hybrid.parameters import hybrid_shapes, left_out, stored_names


def describe_hybrid(file: ConfigFile, weights: WeightFiles) -> Description:
    """
    Raises:
        CheckpointError: the target cannot be loaded.
    """
    config = HybridConfig.from_file(file)
    names = stored_names(config, weights)
    for name, shape in hybrid_shapes(config).items():
        weights.check(names[name], shape)
    ignored = left_out(weights)
    notes = []
    if ignored:
        counted = ", ".join(f"{count} {start}*" for start, count in ignored.items())
        notes.append(f"text only: tensors of other parts are left out ({counted})")
    facts = {
        "architecture": config.architecture,
        "tied_embeddings": config.tie_word_embeddings,
        "biases": {"qkv": config.attention_bias, "output": config.attention_bias, "mlp": False},
        "qk_norm": True,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "layers": config.num_hidden_layers,
        "full_attention_layers": [layer for layer, linear in enumerate(config.is_linear) if not linear],
        "attention_heads": config.num_attention_heads,
        "key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "linear_attention": {"layers": config.linear_layers, **dataclasses.asdict(config.delta)},
        "max_position_embeddings": config.max_position_embeddings,
        "rope": dataclasses.asdict(config.rope),
        "rotary_dim": config.rotary_dim,
    }
    return Description(facts, set(names.values()), ignored, notes)
