"""The target: a dense Llama, Qwen2 or Qwen3 over packed ragged rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.attention import AttentionKernel, CachedAttention, attention_kernel
from dspark.kernels import Choice
from dspark.layers.decoder import DecoderLayer, LayerShape, decoder_layers
from dspark.layers.frozen import FrozenStack
from dspark.layers.linear import FusedLinear
from dspark.layers.norm import FrozenNorm, RMSNorm
from dspark.layers.rotary import RotaryTable
from dspark.target.cache import KVCache
from dspark.target.config import TargetConfig
from dspark.target.passes import EMBEDDINGS_TAP, check_pass, last_rows, side_by_side
from dspark.target.protocol import OwnTarget


class Backbone(nn.Module):
    """Embeddings, decoder layers and final norm, under the published names (`model.*`)."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        shape = LayerShape(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            qkv_bias=config.qkv_bias,
            output_bias=config.output_bias,
            mlp_bias=config.mlp_bias,
            qk_norm=config.qk_norm,
        )
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class TargetModel(OwnTarget, nn.Module):
    """A causal language model whose pass serves many requests, and which can be tapped.

    As built it holds ordinary parameters; `freeze` turns them into the fused weights that inference runs on.
    """

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self._frozen: _Frozen | None = None
        self._rotary: RotaryTable | None = None
        self._kernel: AttentionKernel | None = None

    @property
    def embedding_weight(self) -> Tensor:
        """`[vocabulary, hidden]`; stays readable after `freeze`."""
        return self.model.embed_tokens.weight

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings `[rows, hidden]` of token ids `[rows]`."""
        if self._frozen is None:
            return F.embedding(token_ids, self.embedding_weight)
        return self._frozen.embedding.index_select(0, token_ids)

    def project(self, hidden: Tensor) -> Tensor:
        """Logits `[rows, vocabulary]` of normed hidden states `[rows, hidden]`."""
        return self.lm_head(hidden) if self._frozen is None else self._frozen.head(hidden)

    def freeze(self, fill: Callable[[str], None] = lambda prefix: None) -> TargetModel:
        """Prepares for inference and drops the separate weights: no training or saving afterwards.

        `fill` is called with a prefix of parameter names before those parameters are needed, so that a
        checkpoint can be read while the model is frozen. Embeddings and norms must be filled before the call.
        """
        if self._frozen is None:
            with torch.inference_mode():
                self._frozen = _Frozen(self, fill)
            self.model.layers = nn.ModuleList()
            del self.lm_head
        return self

    def use_kernels(self, choice: Choice) -> dict[str, str]:
        """Lets passes use CUDA kernels from now on; returns what computes each role."""
        self._kernel = attention_kernel(choice, self.dtype, [self.config.head_dim])
        return {"attention": self._kernel.how}

    def new_cache(self) -> KVCache:
        """An empty cache for one request."""
        config = self.config
        return KVCache(
            config.num_hidden_layers, config.num_key_value_heads, config.head_dim, self.dtype, self.device
        )

    def forward(
        self,
        token_ids: Tensor,
        segments: Sequence[tuple[KVCache, int]],
        taps: Sequence[int] = (),
        logits: str = "all",
    ) -> tuple[Tensor, Tensor | None]:
        """One pass over the rows of several requests, one after the other.

        Segment i owns the next n rows, at positions length .. length + n - 1 of its cache. Keys and values
        are written there; the length does not advance (`cache.advance` commits).

        Args:
            token_ids: `[rows]`, int64.
            segments: (cache, n > 0) of each request; the n add up to rows.
            taps: layers whose outputs are wanted; -1 is the embeddings.
            logits: "all" rows, or the "last" row of each segment; "hidden" gives all rows' normed hidden
                states instead.

        Returns:
            Logits `[rows or segments, vocabulary]`, and the taps side by side, `[rows, taps * hidden]` (None
            without taps).
        """
        check_pass(token_ids, segments, logits)
        rows = self._rotary_table().spans([(cache.length, cache.length + n) for cache, n in segments])
        attention = CachedAttention(
            segments, self.config.num_attention_heads, self.config.windows, causal=True, kernel=self._kernel
        )
        outputs: dict[int, Tensor | None] = dict.fromkeys(taps)
        x = self.embed(token_ids)
        if EMBEDDINGS_TAP in outputs:
            outputs[EMBEDDINGS_TAP] = x
        x = self._layers(x, rows, attention, outputs)
        tapped = side_by_side(outputs, taps)
        if logits == "last":
            x = x[last_rows(segments)]
        x = self._norm(x)
        return (x if logits == "hidden" else self.project(x)), tapped

    def _layers(
        self, x: Tensor, rows: Tensor, attention: CachedAttention, outputs: dict[int, Tensor | None]
    ) -> Tensor:
        if self._frozen is not None:
            return self._frozen.layers(x, rows, attention, outputs)
        for index, layer in enumerate(self.model.layers):
            x = layer(x, rows, partial(attention.layer, index))
            if index in outputs:
                outputs[index] = x
        return x

    def _norm(self, x: Tensor) -> Tensor:
        return self.model.norm(x) if self._frozen is None else self._frozen.norm(x)

    def _rotary_table(self) -> RotaryTable:
        if self._rotary is None:
            self._rotary = RotaryTable(self.config.rope, self.config.head_dim, self.dtype, self.device)
        return self._rotary


class _Frozen:
    """The parts that a frozen target runs on. The embeddings stay a parameter: a draft may share them."""

    __slots__ = ("embedding", "head", "layers", "norm")

    def __init__(self, model: TargetModel, fill: Callable[[str], None]) -> None:
        self.embedding = model.embedding_weight.detach()
        self.layers = FrozenStack(
            decoder_layers(model.model.layers), lambda index, part: fill(f"model.layers.{index}.{part}")
        )
        self.norm = FrozenNorm(model.model.norm)
        fill("lm_head.")
        self.head = FusedLinear([model.lm_head])
