"""The tensors of a target's checkpoint, by name and shape; the table that `inspect` and the loader share."""

from __future__ import annotations

from dspark.checkpoint.placeless import refuse_placeless
from dspark.checkpoint.weights import WeightFiles
from dspark.errors import CheckpointError
from dspark.layers.parameters import Shape, layer_shapes
from dspark.target.config import TargetConfig

EMBEDDINGS = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
LAYERS = "model.layers."


def target_shapes(config: TargetConfig, weights: WeightFiles) -> dict[str, Shape]:
    """
    Raises:
        CheckpointError: the config says that the output head is untied, but none is stored; or a layer holds
            a tensor that the config has no place for.
    """
    table = (config.vocab_size, config.hidden_size)
    shapes: dict[str, Shape] = {EMBEDDINGS: table, "model.norm.weight": (config.hidden_size,)}
    if not config.tie_word_embeddings:
        if HEAD not in weights:
            raise CheckpointError(
                f"{weights.where()}: tensor {HEAD} is missing, but tie_word_embeddings is false; "
                f"expected shape {list(table)}"
            )
        shapes[HEAD] = table
    for layer in range(config.num_hidden_layers):
        shapes.update(
            layer_shapes(
                f"{LAYERS}{layer}.",
                config,
                qkv_bias=config.qkv_bias,
                output_bias=config.output_bias,
                mlp_bias=config.mlp_bias,
                qk_norm=config.qk_norm,
            )
        )
    refuse_placeless(weights, shapes, LAYERS, layers=config.num_hidden_layers, biases=config.qkv_bias)
    return shapes
