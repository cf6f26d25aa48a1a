"""The tensors of a draft's checkpoint, by stored name and shape."""

from __future__ import annotations

from dspark.checkpoint.weights import WeightFiles
from dspark.draft.config import DraftConfig
from dspark.draft.packaging.heads import CONFIDENCE_BIAS, stored_name
from dspark.layers.parameters import Shape, layer_shapes


def draft_shapes(config: DraftConfig, weights: WeightFiles) -> dict[str, Shape]:
    """Every tensor that the configuration asks for, under the name that the checkpoint gives it.

    The bias of the confidence head is listed only if it is stored: without one it is zero.
    """
    shapes = _parameters(config)
    if stored_name(weights, CONFIDENCE_BIAS) not in weights:
        shapes.pop(CONFIDENCE_BIAS, None)
    return {stored_name(weights, name): shape for name, shape in shapes.items()}


def _parameters(config: DraftConfig) -> dict[str, Shape]:
    hidden, vocab, rank = config.hidden_size, config.vocab_size, config.markov_rank
    shapes: dict[str, Shape] = {
        "fc.weight": (hidden, len(config.target_layer_ids) * config.target_hidden_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    bias = config.attention_bias
    for layer in range(config.num_hidden_layers):
        shapes.update(
            layer_shapes(
                f"layers.{layer}.", config, qkv_bias=bias, output_bias=bias, mlp_bias=False, qk_norm=True
            )
        )
    if config.own_embeddings:
        shapes["embed_tokens.weight"] = (vocab, hidden)
    if config.own_head:
        shapes["lm_head.weight"] = (vocab, hidden)
    if config.markov_head_type is not None:
        shapes["markov_head.markov_w1.weight"] = (vocab, rank)
        shapes["markov_head.markov_w2.weight"] = (vocab, rank)
    if config.markov_head_type == "gated":
        shapes["markov_head.gate_proj.weight"] = (rank, hidden + rank)
        shapes["markov_head.gate_proj.bias"] = (rank,)
    if config.markov_head_type == "rnn":
        shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + hidden)
        shapes["markov_head.joint_proj.bias"] = (3 * rank,)
    if config.enable_confidence_head:
        width = hidden + (rank if config.confidence_head_with_markov else 0)
        shapes["confidence_head.proj.weight"] = (1, width)
        shapes[CONFIDENCE_BIAS] = (1,)
    return shapes
