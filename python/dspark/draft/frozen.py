"""A draft for inference: fused layers, and the context of all layers in one product."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from dspark.layers.decoder import DecoderLayer
from dspark.layers.frozen import FrozenStack, HeadRotation, normed_product
from dspark.layers.linear import FusedLinear
from dspark.layers.norm import FrozenNorm, RMSNorm


class FrozenDraft:
    """What a frozen `DSparkDraftModel` runs on."""

    __slots__ = (
        "embedding",
        "head",
        "hidden_norm",
        "keys_values",
        "kv_heads",
        "layers",
        "norm",
        "projection",
        "rotation",
        "shape",
    )

    def __init__(
        self,
        projection: nn.Linear,
        hidden_norm: RMSNorm,
        layers: Sequence[DecoderLayer],
        norm: RMSNorm,
        embeddings: nn.Embedding | None,
        head: nn.Linear | None,
    ) -> None:
        shape = layers[0].shape
        self.projection = FusedLinear([projection])
        self.layers = FrozenStack(layers)
        self.norm = FrozenNorm(norm)
        self.embedding = embeddings.weight.detach() if embeddings is not None else None
        self.head = FusedLinear([head]) if head is not None else None
        attentions = [layer.self_attn for layer in layers]
        self.hidden_norm, self.keys_values = normed_product(
            hidden_norm, [linear for one in attentions for linear in (one.k_proj, one.v_proj)]
        )
        keys = [(one.k_norm, 1.0, shape.num_key_value_heads) for one in attentions]
        self.rotation = HeadRotation([[group] for group in keys], norm.weight, shape.head_dim)
        self.kv_heads = shape.num_key_value_heads
        self.shape = (-1, len(layers), 2 * self.kv_heads, shape.head_dim)

    def context(self, taps: Tensor, rows: Tensor) -> Tensor:
        """Context keys and values of every layer, `[layers, 2 * key heads, rows, head_dim]`.

        Args:
            taps: `[rows, taps * target hidden]`. rows: of a `RotaryTable`, `[2, rows, head_dim]`.
        """
        context = self.hidden_norm(self.projection(taps))
        heads = self.keys_values(context).view(self.shape)
        self.rotation.apply(heads[:, :, : self.kv_heads], *self.rotation.prepare_all(rows))
        return heads.permute(1, 2, 0, 3)
