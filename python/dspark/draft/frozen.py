"""A draft for inference: fused layers, and the context of all layers in one product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor, nn

from dspark.attention import CachedAttention
from dspark.layers.decoder import DecoderLayer
from dspark.layers.frozen import FrozenStack, HeadRotation, normed_product
from dspark.layers.linear import FusedLinear
from dspark.layers.norm import FrozenNorm, RMSNorm


class FrozenLayers(Protocol):
    """The layers of a block's pass."""

    def __call__(self, x: Tensor, rows: Tensor, attention: CachedAttention) -> Tensor:
        """x `[rows, hidden]`, rows: those of a `RotaryTable`."""


class FrozenDraft:
    """The parts that a frozen `DSparkDraftModel` runs on."""

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
        fill: Callable[[str], None],
    ) -> None:
        """Takes the weights out of the linears, one layer after the other; `fill` as in
        `DSparkDraftModel.freeze`."""
        shape = layers[0].shape
        fill("fc.")
        fill("embed_tokens.")
        self._ends(projection, norm, embeddings, head)
        attentions = [layer.self_attn for layer in layers]
        heads: list[nn.Linear] = []

        def ready(index: int, part: str) -> None:
            fill(f"layers.{index}.{part}")
            if part == "self_attn.":
                one = attentions[index]
                heads.extend(another(linear) for linear in (one.k_proj, one.v_proj))

        self.layers: FrozenLayers = FrozenStack(layers, ready)
        self.hidden_norm, self.keys_values = normed_product(hidden_norm, heads)
        keys = [(one.k_norm, 1.0, shape.num_key_value_heads) for one in attentions]
        self.rotation = HeadRotation([[group] for group in keys], norm.weight, shape.head_dim)
        self.kv_heads = shape.num_key_value_heads
        self.shape = (-1, len(layers), 2 * self.kv_heads, shape.head_dim)

    def _ends(
        self, projection: nn.Linear, norm: RMSNorm, embeddings: nn.Embedding | None, head: nn.Linear | None
    ) -> None:
        """Sets what does not depend on the kind of layers."""
        self.projection = FusedLinear([projection], release=True)
        self.norm = FrozenNorm(norm)
        self.embedding = embeddings.weight.detach() if embeddings is not None else None
        self.head = FusedLinear([head], release=True) if head is not None else None

    def context(self, taps: Tensor, rows: Tensor) -> Tensor:
        """Context keys and values of every layer, `[layers, 2 * key heads, rows, head_dim]`.

        Args:
            taps: `[rows, taps * target hidden]`. rows: those of a `RotaryTable`, `[2, rows, head_dim]`.
        """
        context = self.hidden_norm(self.projection(taps))
        heads = self.keys_values(context).view(self.shape)
        self.rotation.apply(heads[:, :, : self.kv_heads], *self.rotation.prepare_all(rows))
        return heads.permute(1, 2, 0, 3)


def another(linear: nn.Linear) -> nn.Linear:
    """A second linear with the same weights, which keeps them when the first one releases its own."""
    twin = nn.Linear(1, 1, bias=False, device="meta")
    twin.weight, twin.bias = linear.weight, linear.bias
    return twin
