"""The tensors of Gemma 4 layers and targets, by name and shape; needs no torch."""

from __future__ import annotations

import re
from collections import Counter
from typing import Protocol

from dspark.checkpoint.placeless import refuse_placeless
from dspark.checkpoint.weights import WeightFiles
from dspark.errors import CheckpointError
from dspark.layers.parameters import Shape
from dspark.target.gemma4.config import Gemma4Config, KindHeads

HEAD = "lm_head.weight"
OTHER_SENSES = re.compile(r"model\.(embed_)?(vision|audio)\w*\.")


class Gemma4LayerSizes(Protocol):
    """The sizes that both a target's and a draft's config have."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def attention_bias(self) -> bool: ...


def gemma4_layer_shapes(prefix: str, sizes: Gemma4LayerSizes, heads: KindHeads) -> dict[str, Shape]:
    """The tensors of one layer, their names starting with `prefix`."""
    hidden, inner = sizes.hidden_size, sizes.intermediate_size
    queries = sizes.num_attention_heads * heads.head_dim
    keys = heads.num_key_value_heads * heads.head_dim
    products = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries)}
    if heads.shared_values:
        del products["v"]
    shapes: dict[str, Shape] = {}
    for name, (rows, columns) in products.items():
        shapes[f"{prefix}self_attn.{name}_proj.weight"] = (rows, columns)
        if sizes.attention_bias:
            shapes[f"{prefix}self_attn.{name}_proj.bias"] = (rows,)
    for name in ("q_norm", "k_norm"):
        shapes[f"{prefix}self_attn.{name}.weight"] = (heads.head_dim,)
    for name in ("gate_proj", "up_proj"):
        shapes[f"{prefix}mlp.{name}.weight"] = (inner, hidden)
    shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, inner)
    for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
        shapes[f"{prefix}{name}_layernorm.weight"] = (hidden,)
    shapes[f"{prefix}layer_scalar"] = (1,)
    return shapes


def gemma4_shapes(config: Gemma4Config) -> dict[str, Shape]:
    """The tensors of a target by the names of its parameters, which have no wrapper's prefix."""
    table = (config.vocab_size, config.hidden_size)
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": table,
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes[HEAD] = table
    for layer, kind in enumerate(config.kinds):
        shapes.update(gemma4_layer_shapes(f"model.layers.{layer}.", config, config.heads[kind]))
    return shapes


def stored_names(config: Gemma4Config, weights: WeightFiles) -> dict[str, str]:
    """Maps each parameter's name to the name of its tensor.

    Raises:
        CheckpointError: the config says that the output head is untied, but none is stored; or a layer
            of the text model holds a tensor that the config has no place for.
    """
    shapes = gemma4_shapes(config)
    if HEAD in shapes and HEAD not in weights:
        raise CheckpointError(
            f"{weights.where()}: tensor {HEAD} is missing, but tie_word_embeddings is false; "
            f"expected shape {list(shapes[HEAD])}"
        )
    names = {name: name if name == HEAD else config.prefix + name.removeprefix("model.") for name in shapes}
    stored, layers = set(names.values()), config.num_hidden_layers
    refuse_placeless(weights, stored, f"{config.prefix}layers.", layers=layers, biases=config.attention_bias)
    return names


def left_out(weights: WeightFiles) -> dict[str, int]:
    """Counts of the vision and audio tensors, by the start of their names."""
    starts = [match[0] for name in weights.tensors if (match := OTHER_SENSES.match(name))]
    return dict(Counter(starts))
