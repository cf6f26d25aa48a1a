"""The parameters of a draft by name and shape, and where its checkpoint stores them."""

from __future__ import annotations

from dspark.checkpoint.header import StoredTensor
from dspark.checkpoint.placeless import refuse_placeless
from dspark.checkpoint.weights import WeightFiles
from dspark.draft.config import DraftConfig
from dspark.draft.gemma4.config import Gemma4DraftConfig
from dspark.draft.packaging.heads import CONFIDENCE_BIAS, stored_name
from dspark.layers.parameters import Shape, layer_shapes
from dspark.target.gemma4.parameters import gemma4_layer_shapes

LAYERS = "layers."


def stored_parameters(config: DraftConfig, weights: WeightFiles) -> dict[str, StoredTensor]:
    """Where each parameter is stored, by its published name; an absent bias of the confidence head is left
    out: it is zero.

    Raises:
        CheckpointError: a tensor is missing, or of another shape or dtype than it must be; or a layer holds
            one that the configuration has no place for.
    """
    shapes = draft_shapes(config)
    names = {own: stored_name(weights, own) for own in shapes}
    if CONFIDENCE_BIAS in names and names[CONFIDENCE_BIAS] not in weights:
        del names[CONFIDENCE_BIAS]
    layers, biases = config.num_hidden_layers, config.attention_bias
    refuse_placeless(weights, set(names.values()), LAYERS, layers=layers, biases=biases)
    return {own: weights.check(name, shapes[own]) for own, name in names.items()}


def draft_shapes(config: DraftConfig) -> dict[str, Shape]:
    """The parameters that the configuration asks for, by their published names."""
    hidden, vocab, rank = config.hidden_size, config.vocab_size, config.markov_rank
    drafted = config.draft_vocab_size
    shapes: dict[str, Shape] = {
        "fc.weight": (hidden, len(config.target_layer_ids) * config.target_hidden_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(config.num_hidden_layers):
        shapes.update(_layer(f"{LAYERS}{layer}.", config))
    if config.own_embeddings:
        shapes["embed_tokens.weight"] = (vocab, hidden)
    if config.own_head:
        shapes["lm_head.weight"] = (drafted, hidden)
    if config.markov_head_type is not None:
        shapes["markov_head.markov_w1.weight"] = (vocab, rank)
        shapes["markov_head.markov_w2.weight"] = (drafted, rank)
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


def _layer(prefix: str, config: DraftConfig) -> dict[str, Shape]:
    if isinstance(config, Gemma4DraftConfig):
        return gemma4_layer_shapes(prefix, config, config.heads)
    bias = config.attention_bias
    return layer_shapes(prefix, config, qkv_bias=bias, output_bias=bias, mlp_bias=False, qk_norm=True)
