"""Names and shapes of a decoder layer's tensors; needs no torch."""

from __future__ import annotations

from typing import Protocol

Shape = tuple[int, ...]


class LayerSizes(Protocol):
    """The sizes that both a target's and a draft's config have."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


def layer_shapes(
    prefix: str, sizes: LayerSizes, *, qkv_bias: bool, output_bias: bool, mlp_bias: bool, qk_norm: bool
) -> dict[str, Shape]:
    """The tensors of one layer, their names starting with `prefix`."""
    hidden, inner, head = sizes.hidden_size, sizes.intermediate_size, sizes.head_dim
    queries, keys = sizes.num_attention_heads * head, sizes.num_key_value_heads * head
    products = {
        "self_attn.q_proj": (queries, hidden, qkv_bias),
        "self_attn.k_proj": (keys, hidden, qkv_bias),
        "self_attn.v_proj": (keys, hidden, qkv_bias),
        "self_attn.o_proj": (hidden, queries, output_bias),
        "mlp.gate_proj": (inner, hidden, mlp_bias),
        "mlp.up_proj": (inner, hidden, mlp_bias),
        "mlp.down_proj": (hidden, inner, mlp_bias),
    }
    shapes: dict[str, Shape] = {}
    for name, (rows, columns, bias) in products.items():
        shapes[f"{prefix}{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{prefix}{name}.bias"] = (rows,)
    for name in ("input_layernorm", "post_attention_layernorm"):
        shapes[f"{prefix}{name}.weight"] = (hidden,)
    if qk_norm:
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            shapes[f"{prefix}{name}.weight"] = (head,)
    return shapes
