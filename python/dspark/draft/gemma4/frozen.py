"""A Gemma 4 draft for inference."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from dspark.attention import CachedAttention
from dspark.draft.frozen import FrozenDraft, another
from dspark.layers.frozen import HeadRotation, normed_product
from dspark.layers.norm import RMSNorm
from dspark.target.gemma4.frozen import FrozenGemma4Stack, KindPass, value_norm
from dspark.target.gemma4.layer import Gemma4Layer
from dspark.target.gemma4.rotation import FULL


class FrozenGemma4Draft(FrozenDraft):
    """The parts that a frozen `Gemma4DSparkModel` runs on."""

    __slots__ = ("value_norm",)

    def __init__(
        self,
        projection: nn.Linear,
        hidden_norm: RMSNorm,
        layers: Sequence[Gemma4Layer],
        norm: RMSNorm,
        embeddings: nn.Embedding | None,
        head: nn.Linear | None,
        fill: Callable[[str], None],
    ) -> None:
        """`fill` as in `DSparkDraftModel.freeze`."""
        shape = layers[0].shape
        fill("fc.")
        fill("embed_tokens.")
        self._ends(projection, norm, embeddings, head)
        products: list[nn.Linear] = []

        def ready(index: int) -> None:
            fill(f"layers.{index}.")
            products.extend(another(linear) for linear in layers[index].self_attn.stored())

        self.layers = _FullLayers(layers, ready)
        self.hidden_norm, self.keys_values = normed_product(hidden_norm, products)
        self.kv_heads = shape.num_key_value_heads
        keys = [[(layer.self_attn.k_norm, 1.0, self.kv_heads)] for layer in layers]
        self.rotation = HeadRotation(keys, norm.weight, shape.head_dim)
        self.value_norm = value_norm(layers[0])
        self.shape = (-1, len(layers), len(products) // len(layers) * self.kv_heads, shape.head_dim)

    def context(self, taps: Tensor, rows: Tensor) -> Tensor:
        heads = self.keys_values(self.hidden_norm(self.projection(taps))).view(self.shape)
        values = self.value_norm(heads[:, :, -self.kv_heads :])  # shared values are the keys before rotation
        keys = heads[:, :, : self.kv_heads]
        self.rotation.apply(keys, *self.rotation.prepare_all(rows))
        return torch.cat((keys, values), dim=2).permute(1, 2, 0, 3)


class _FullLayers:
    """A stack with layers of one kind only."""

    def __init__(self, layers: Sequence[Gemma4Layer], ready: Callable[[int], None]) -> None:
        self.stack = FrozenGemma4Stack(layers, [FULL] * len(layers), ready)

    def __call__(self, x: Tensor, rows: Tensor, attention: CachedAttention) -> Tensor:
        return self.stack(x, {FULL: KindPass(rows, attention.layer)})
