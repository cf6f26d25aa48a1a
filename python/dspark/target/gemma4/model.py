"""The Gemma 4 target over packed ragged rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from dspark.attention import AttentionKernel, CachedAttention, KVStore, attention_kernel
from dspark.kernels import Choice
from dspark.layers.linear import FusedLinear
from dspark.layers.norm import FrozenNorm, RMSNorm
from dspark.layers.rotary import RotaryTable
from dspark.target.gemma4.cache import Gemma4Cache, SlidingStore
from dspark.target.gemma4.config import Gemma4Config
from dspark.target.gemma4.frozen import FrozenGemma4Stack, KindPass
from dspark.target.gemma4.layer import (
    Gemma4Layer,
    Gemma4LayerShape,
    embedding_scale,
    gemma4_layers,
    scaled_embedding,
    soft_capped,
)
from dspark.target.gemma4.rotation import SLIDING
from dspark.target.passes import EMBEDDINGS_TAP, check_pass, last_rows, side_by_side
from dspark.target.protocol import OwnTarget


class Backbone(nn.Module):
    """Embeddings, decoder layers and final norm, under the published names (`model.*`)."""

    def __init__(self, config: Gemma4Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Gemma4Layer(_shape(config, kind)) for kind in config.kinds)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Gemma4TargetModel(OwnTarget, nn.Module):
    """A causal language model whose pass serves many requests, and which can be tapped (see `Target`).

    As built it holds ordinary parameters; `freeze` turns them into the fused weights that inference runs on.
    """

    def __init__(self, config: Gemma4Config) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self._places = _places(config.kinds)
        self._frozen: _Frozen | None = None
        self._aliases: Tensor | None = None
        self._rotary: dict[str, RotaryTable] = {}
        self._kernel: AttentionKernel | None = None

    @property
    def embedding_weight(self) -> Tensor:
        """`[vocabulary, hidden]` as stored, without the factor of `embed`; stays readable after `freeze`."""
        return self.model.embed_tokens.weight

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings `[rows, hidden]` of token ids `[rows]`, times sqrt(hidden)."""
        if self.config.placeholders:
            token_ids = self._embedded_as(token_ids)
        if self._frozen is None:
            return scaled_embedding(self.embedding_weight, token_ids)
        return self._frozen.embedding.index_select(0, token_ids).mul_(self._frozen.scale)

    def _embedded_as(self, token_ids: Tensor) -> Tensor:
        if self._aliases is None:
            with torch.inference_mode(False):  # kept for later passes, which may want gradients
                self._aliases = torch.arange(self.config.vocab_size, device=self.device)
                for token, other in self.config.placeholders.items():
                    self._aliases[token] = other
        return self._aliases[token_ids]

    def project(self, hidden: Tensor) -> Tensor:
        """Logits `[rows, vocabulary]` of normed hidden states `[rows, hidden]`, soft-capped."""
        logits = self.lm_head(hidden) if self._frozen is None else self._frozen.head(hidden)
        return soft_capped(logits, self.config.final_logit_softcapping)

    def freeze(self) -> Gemma4TargetModel:
        """Prepares for inference and drops the separate weights: no training or saving afterwards."""
        if self._frozen is None:
            with torch.inference_mode():
                self._frozen = _Frozen(self)
            self.model.layers = nn.ModuleList()
            del self.lm_head
        return self

    def use_kernels(self, choice: Choice) -> dict[str, str]:
        """Lets passes use CUDA kernels from now on; returns what computes each role."""
        sizes = [heads.head_dim for heads in self.config.heads.values()]
        self._kernel = attention_kernel(choice, self.dtype, sizes)
        return {"attention": self._kernel.how}

    def new_cache(self) -> Gemma4Cache:
        """An empty cache for one request."""
        return Gemma4Cache({kind: self._new_store(kind) for kind in self.config.heads})

    def _new_store(self, kind: str) -> KVStore:
        heads, layers = self.config.heads[kind], self.config.kinds.count(kind)
        sizes = layers, heads.num_key_value_heads, heads.head_dim, self.dtype, self.device
        if kind == SLIDING:
            return SlidingStore(*sizes, window=self.config.sliding_window)
        return KVStore(*sizes)

    def forward(
        self,
        token_ids: Tensor,
        segments: Sequence[tuple[Gemma4Cache, int]],
        taps: Sequence[int] = (),
        logits: str = "all",
    ) -> tuple[Tensor, Tensor | None]:
        """One pass over the rows of several requests, one after the other; see `Target`.

        Taps are taken after the layer's scalar; -1 is the embeddings, scaled.
        """
        check_pass(token_ids, segments, logits)
        for cache, n in segments:
            cache.make_room(n)
        passes = {kind: self._pass(kind, segments) for kind in self.config.heads}
        outputs: dict[int, Tensor | None] = dict.fromkeys(taps)
        x = self.embed(token_ids)
        if EMBEDDINGS_TAP in outputs:
            outputs[EMBEDDINGS_TAP] = x
        x = self._layers(x, passes, outputs)
        tapped = side_by_side(outputs, taps)
        if logits == "last":
            x = x[last_rows(segments)]
        x = self._norm(x)
        return (x if logits == "hidden" else self.project(x)), tapped

    def _pass(self, kind: str, segments: Sequence[tuple[Gemma4Cache, int]]) -> KindPass:
        config, layers = self.config, self.config.kinds.count(kind)
        window = config.sliding_window if kind == SLIDING else None
        stores = [(cache.stores[kind], n) for cache, n in segments]
        attention = CachedAttention(
            stores, config.num_attention_heads, [window] * layers, causal=True, kernel=self._kernel
        )
        spans = [(cache.length, cache.length + n) for cache, n in segments]
        return KindPass(self._rotary_table(kind).spans(spans), attention.layer)

    def _layers(self, x: Tensor, passes: dict[str, KindPass], outputs: dict[int, Tensor | None]) -> Tensor:
        if self._frozen is not None:
            return self._frozen.layers(x, passes, outputs)
        for index, (layer, kind) in enumerate(zip(self.model.layers, self.config.kinds, strict=True)):
            rows, attend = passes[kind]
            x = layer(x, rows, partial(attend, self._places[index]))
            if index in outputs:
                outputs[index] = x
        return x

    def _norm(self, x: Tensor) -> Tensor:
        return self.model.norm(x) if self._frozen is None else self._frozen.norm(x)

    def _rotary_table(self, kind: str) -> RotaryTable:
        if kind not in self._rotary:
            config = self.config
            self._rotary[kind] = RotaryTable(
                config.ropes[kind], config.heads[kind].head_dim, self.dtype, self.device
            )
        return self._rotary[kind]


class _Frozen:
    """The parts that a frozen target runs on. The embeddings stay a parameter: a draft may share them."""

    __slots__ = ("embedding", "head", "layers", "norm", "scale")

    def __init__(self, model: Gemma4TargetModel) -> None:
        self.embedding = model.embedding_weight.detach()
        self.scale = embedding_scale(model.config.hidden_size, model.dtype)
        self.layers = FrozenGemma4Stack(gemma4_layers(model.model.layers), model.config.kinds)
        self.norm = FrozenNorm(model.model.norm)
        self.head = FusedLinear([model.lm_head])


def _shape(config: Gemma4Config, kind: str) -> Gemma4LayerShape:
    heads = config.heads[kind]
    return Gemma4LayerShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=heads.num_key_value_heads,
        head_dim=heads.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        bias=config.attention_bias,
        shared_values=heads.shared_values,
    )


def _places(kinds: Sequence[str]) -> list[int]:
    """Each layer's number among the layers of its kind."""
    return [kinds[:layer].count(kind) for layer, kind in enumerate(kinds)]
