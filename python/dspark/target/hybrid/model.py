"""The hybrid target over packed ragged rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from dspark.attention import AttentionKernel, CachedAttention, attention_kernel
from dspark.kernels import Choice
from dspark.layers.linear import FusedLinear
from dspark.layers.norm import FrozenNorm
from dspark.target.hybrid.cache import HybridCache
from dspark.target.hybrid.config import HybridConfig
from dspark.target.hybrid.delta import AT_ONCE
from dspark.target.hybrid.frozen import FrozenHybridStack
from dspark.target.hybrid.modules import HybridDecays, HybridWeights
from dspark.target.hybrid.recurrence import Recurrence, TorchRecurrence, recurrence
from dspark.target.hybrid.rotary import PartialRotaryTable
from dspark.target.passes import EMBEDDINGS_TAP, check_pass, last_rows, side_by_side
from dspark.target.protocol import OwnTarget


class HybridTarget(OwnTarget):
    """A `Target` for inference only: it takes over the loaded weights and fuses them."""

    forks_at_parts = True

    def __init__(self, config: HybridConfig, weights: HybridWeights, decays: HybridDecays) -> None:
        self.config = config
        with torch.inference_mode():
            self._embedding = weights.embed_tokens.weight.detach()
            self._layers = FrozenHybridStack(weights, decays, config)
            self._norm = FrozenNorm(weights.norm)
            self._head = FusedLinear([weights.lm_head])
        self._kernel: AttentionKernel | None = None
        self._recurrence: Recurrence = TorchRecurrence(config.delta, "kernels were not asked for")
        self._rotary = PartialRotaryTable(
            config.rope, config.head_dim, config.rotary_dim, self.dtype, self.device
        )

    @property
    def embedding_weight(self) -> Tensor:
        """`[vocabulary, hidden]`."""
        return self._embedding

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings `[rows, hidden]` of token ids `[rows]`."""
        return self._embedding.index_select(0, token_ids)

    def project(self, hidden: Tensor) -> Tensor:
        """Logits `[rows, vocabulary]` of normed hidden states `[rows, hidden]`."""
        return self._head(hidden)

    def use_kernels(self, choice: Choice) -> dict[str, str]:
        """Lets passes use CUDA kernels from now on; returns what computes each role."""
        self._kernel = attention_kernel(choice, self.dtype, [self.config.head_dim])
        self._recurrence = recurrence(choice, self.config.delta, self.dtype)
        return {"attention": self._kernel.how, "recurrence": self._recurrence.how}

    def new_cache(self) -> HybridCache:
        """An empty cache for one request."""
        return HybridCache(self.config, self.dtype, self.device)

    def __call__(
        self,
        token_ids: Tensor,
        segments: Sequence[tuple[HybridCache, int]],
        taps: Sequence[int] = (),
        logits: str = "all",
    ) -> tuple[Tensor, Tensor | None]:
        """See `Target.__call__`."""
        check_pass(token_ids, segments, logits)
        rows = self._rotary.spans([(cache.length, cache.length + n) for cache, n in segments])
        attention = CachedAttention(
            [(cache.kv, n) for cache, n in segments],
            self.config.num_attention_heads,
            (None,) * self.config.attention_layers,
            causal=True,
            kernel=self._kernel,
        )
        delta = self._recurrence.begin(segments)
        if max(n for _, n in segments) > AT_ONCE:
            self._keep_whole(token_ids, segments)
        outputs: dict[int, Tensor | None] = dict.fromkeys(taps)
        x = self.embed(token_ids)
        if EMBEDDINGS_TAP in outputs:
            outputs[EMBEDDINGS_TAP] = x
        x = self._layers(x, rows, attention, delta, outputs)
        tapped = side_by_side(outputs, taps)
        if logits == "last":
            x = x[last_rows(segments)]
        x = self._norm(x)
        return (x if logits == "hidden" else self.project(x)), tapped

    def _keep_whole(self, token_ids: Tensor, segments: Sequence[tuple[HybridCache, int]]) -> None:
        """Marks long segments as kept whole: only the states after their last row wait (`LongSegment`). The
        engine keeps every part of a prompt whole; a caller that keeps less pays for another pass."""
        parts = torch.split(token_ids, [n for _, n in segments])
        for (cache, n), part in zip(segments, parts, strict=True):
            if n > AT_ONCE:
                cache.keep_whole(partial(self._again, part))

    def _again(self, token_ids: Tensor, cache: HybridCache, count: int) -> None:
        self(token_ids[:count], [(cache, count)], logits="hidden")
