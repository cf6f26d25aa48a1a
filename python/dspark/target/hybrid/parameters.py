"""The tensors of a hybrid target's checkpoint: by module name, stored name and shape."""

from __future__ import annotations

from dspark.checkpoint.placeless import refuse_placeless
from dspark.checkpoint.weights import WeightFiles
from dspark.errors import CheckpointError
from dspark.layers.parameters import Shape
from dspark.target.hybrid.config import HybridConfig

EMBEDDINGS = "embed_tokens.weight"
HEAD = "lm_head.weight"
PREFIXES = ("model.language_model.", "model.", "language_model.model.")
"""Starts of the text model's tensor names: in the multimodal wrapper, without one, in older wrappers."""

HEADS = (HEAD, "language_model.lm_head.weight")
LEFT_OUT = ("mtp.", "model.mtp.", "model.visual.", "visual.")
"""Multi-token-prediction layers and vision towers: not part of the text model."""

DECAY = ("A_log", "dt_bias", "norm.weight")
"""Small tensors of each layer's `linear_attn`, kept in float32 at least, whatever the model's dtype."""


def hybrid_shapes(config: HybridConfig) -> dict[str, Shape]:
    """Shapes by module name, which is the stored name without its prefix."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, Shape] = {EMBEDDINGS: (config.vocab_size, hidden), "norm.weight": (hidden,)}
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    for layer, linear in enumerate(config.is_linear):
        mixer = _delta_shapes(config) if linear else _attention_shapes(config)
        common: dict[str, Shape] = {
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
        }
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in (common | mixer).items()}
    return shapes


def _attention_shapes(config: HybridConfig) -> dict[str, Shape]:
    hidden, head = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    rows = {"q_proj": 2 * queries, "k_proj": keys, "v_proj": keys, "o_proj": hidden}
    shapes: dict[str, Shape] = {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    for name, size in rows.items():
        shapes[f"self_attn.{name}.weight"] = (size, queries if name == "o_proj" else hidden)
        if config.attention_bias:
            shapes[f"self_attn.{name}.bias"] = (size,)
    return shapes


def _delta_shapes(config: HybridConfig) -> dict[str, Shape]:
    delta, hidden = config.delta, config.hidden_size
    return {
        "linear_attn.in_proj_qkv.weight": (delta.channels, hidden),
        "linear_attn.in_proj_z.weight": (delta.values, hidden),
        "linear_attn.in_proj_b.weight": (delta.value_heads, hidden),
        "linear_attn.in_proj_a.weight": (delta.value_heads, hidden),
        "linear_attn.conv1d.weight": (delta.channels, 1, delta.kernel),
        "linear_attn.out_proj.weight": (hidden, delta.values),
        "linear_attn.A_log": (delta.value_heads,),
        "linear_attn.dt_bias": (delta.value_heads,),
        "linear_attn.norm.weight": (delta.value_dim,),
    }


def stored_names(config: HybridConfig, weights: WeightFiles) -> dict[str, str]:
    """Maps each module name to its stored name.

    Raises:
        CheckpointError: the text model's embeddings are under none of the known prefixes, or under several;
            the head is untied, but none is stored; a layer of the text model holds a tensor that the config
            has no place for.
    """
    found = [prefix for prefix in PREFIXES if f"{prefix}{EMBEDDINGS}" in weights]
    if len(found) != 1:
        seen = f"found both {found[0]} and {found[1]}" if found else "found none of them"
        raise CheckpointError(
            f"{weights.where()}: expected {EMBEDDINGS} under one of {', '.join(PREFIXES)}, {seen}"
        )
    names = {name: f"{found[0]}{name}" for name in hybrid_shapes(config) if name != HEAD}
    if not config.tie_word_embeddings:
        head = next((name for name in HEADS if name in weights), None)
        if head is None:
            raise CheckpointError(
                f"{weights.where()}: tensor {HEAD} is missing, but tie_word_embeddings is false; "
                f"expected shape {[config.vocab_size, config.hidden_size]}"
            )
        names[HEAD] = head
    stored, layers = set(names.values()), config.num_hidden_layers
    refuse_placeless(weights, stored, f"{found[0]}layers.", layers=layers, biases=config.attention_bias)
    return names


def left_out(weights: WeightFiles) -> dict[str, int]:
    """Counts of the tensors that are no part of the text model, by the start of their names."""
    counts = {start: sum(name.startswith(start) for name in weights.tensors) for start in LEFT_OUT}
    return {start: count for start, count in counts.items() if count}
