"""The draft: a block of tokens in one pass, conditioned on the target's hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.attention import AttentionKernel, CachedAttention, attention_kernel
from dspark.draft.confidence import AcceptRatePredictor
from dspark.draft.config import DraftConfig
from dspark.draft.context import DraftContext
from dspark.draft.frozen import FrozenDraft
from dspark.draft.markov import build_markov_head
from dspark.errors import ConfigError
from dspark.kernels import Choice
from dspark.layers.decoder import DecoderLayer, KeysValues, LayerShape, decoder_layers
from dspark.layers.norm import RMSNorm
from dspark.layers.rotary import RotaryTable
from dspark.target.protocol import OURS, Target


class DSparkDraftModel(nn.Module):
    """DFlash backbone with, where the configuration has them, a Markov head and a confidence head.

    A block is `block_size` inputs, the anchor and then mask tokens, at positions p .. p + block_size - 1
    where p is the length of the context. Parameters carry the published names. `freeze` prepares for
    inference.
    """

    target_ids: Tensor | None
    """For a reduced draft vocabulary, the target's token of each column of base logits: ascending, int64."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("target_ids", None, persistent=False)
        taps = len(config.target_layer_ids)
        self.fc = nn.Linear(taps * config.target_hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = self._build_layers()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.embed_tokens = (
            nn.Embedding(config.vocab_size, config.hidden_size) if config.own_embeddings else None
        )
        self.lm_head = (
            nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False) if config.own_head else None
        )
        self.markov_head = build_markov_head(
            config.markov_head_type,
            config.vocab_size,
            config.markov_rank,
            config.hidden_size,
            config.draft_vocab_size,
        )
        self.confidence_head: AcceptRatePredictor | None = None
        if config.enable_confidence_head:
            rank = config.markov_rank if config.confidence_head_with_markov else 0
            self.confidence_head = AcceptRatePredictor(config.hidden_size, rank)
        self._target: Target | None = None
        self._frozen: FrozenDraft | None = None
        self._rotary: RotaryTable | None = None
        self._kernel: AttentionKernel | None = None

    def _build_layers(self) -> nn.ModuleList:
        config = self.config
        shape = LayerShape(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
            qk_norm=True,
        )
        return nn.ModuleList(DecoderLayer(shape) for _ in range(config.num_hidden_layers))

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype."""
        return self.norm.weight.dtype

    def bind(self, target: Target) -> DSparkDraftModel:
        """Borrows from the target what the draft does not own: embeddings, output head.

        The draft may compute in another dtype than the target. What it borrows is converted: embeddings
        and taps in every pass, a tied head once (`freeze`). An untied head is the target's own, in the
        target's dtype.

        Raises:
            ConfigError: sizes, taps or device do not fit together.
        """
        config, theirs = self.config, target.config
        for name, ours, other in (
            ("vocab_size", config.vocab_size, theirs.vocab_size),
            ("width of a tap", config.target_hidden_size, theirs.hidden_size),
            (
                "num_target_layers",
                config.num_target_layers or theirs.num_hidden_layers,
                theirs.num_hidden_layers,
            ),
            ("device", self.device, target.device),
        ):
            if ours != other:
                raise ConfigError(
                    f"the draft does not fit the target: {name} is {ours} in the draft, {other} in the target"
                )
        for tap in config.target_layer_ids:
            if not -1 <= tap < theirs.num_hidden_layers - 1:
                raise ConfigError(
                    f"the draft taps layer {tap}, but of the target's {theirs.num_hidden_layers} layers "
                    f"only -1 (embeddings) to {theirs.num_hidden_layers - 2} can be tapped"
                )
        borrows = not (config.own_embeddings and config.own_head)
        if borrows and config.hidden_size != theirs.hidden_size:
            raise ConfigError(
                f"the draft has hidden size {config.hidden_size} and takes embeddings or head from the "
                f"target, whose hidden size is {theirs.hidden_size}"
            )
        for what, own in (("embeddings", config.own_embeddings), ("output head", config.own_head)):
            refusals = {} if own else target.refuses_to_lend
            if what in refusals:
                raise ConfigError(f"the draft has no {what} of its own, and {refusals[what]}")
        self.__dict__["_target"] = target  # not a submodule: the target's parameters are not the draft's
        return self

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings `[rows, hidden]` of token ids `[rows]`: the draft's own, or the target's."""
        if self._frozen is not None and self._frozen.embedding is not None:
            return self._frozen.embedding.index_select(0, token_ids)
        if self.embed_tokens is not None:
            return F.embedding(token_ids, self.embed_tokens.weight)
        return self._needed_target("embeddings").embed(token_ids).to(self.dtype)

    def project(self, hidden: Tensor) -> Tensor:
        """Base logits `[rows, draft vocabulary]` of the backbone's output `[rows, hidden]`."""
        if self._frozen is not None and self._frozen.head is not None:
            return self._frozen.head(hidden)
        if self.lm_head is not None:
            return self.lm_head(hidden)  # type: ignore[no-any-return]
        target = self._needed_target("output head")
        logits = target.project(hidden.to(target.dtype))
        return logits if self.target_ids is None else logits.index_select(1, self.target_ids)

    def freeze(self, fill: Callable[[str], None] = lambda prefix: None) -> DSparkDraftModel:
        """Prepares for inference and drops the separate weights: no training or saving afterwards.

        `fill` is called with a prefix of parameter names before those parameters are needed, so that a
        checkpoint can be read while the model is frozen and is never in memory twice.
        """
        if self._frozen is None:
            fill("lm_head.")
            with torch.inference_mode():
                self._frozen = self._frozen_parts(self.lm_head or self._converted_head(), fill)
            self.layers = nn.ModuleList()
            self.fc = self.hidden_norm = self.lm_head = None  # type: ignore[assignment]
        return self

    def _frozen_parts(self, head: nn.Linear | None, fill: Callable[[str], None]) -> FrozenDraft:
        layers = decoder_layers(self.layers)
        return FrozenDraft(self.fc, self.hidden_norm, layers, self.norm, self.embed_tokens, head, fill)

    def _converted_head(self) -> nn.Linear | None:
        """The target's tied head in the draft's dtype, if the two differ; for a reduced vocabulary only the
        rows that can be drafted, so that the others are not multiplied."""
        target = self._target
        if target is None or not target.config.tie_word_embeddings:
            return None
        if target.dtype == self.dtype and not self.config.reduced:
            return None
        if getattr(target.config, "final_logit_softcapping", None) is not None:
            return None  # such a head does more than multiply
        weight = target.embedding_weight
        if self.target_ids is not None:
            if target.runs_through != OURS:
                return None  # an adapted target's head may do more than multiply
            weight = weight.index_select(0, self.target_ids)
        weight = weight.to(self.dtype)
        head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        head.weight = nn.Parameter(weight, requires_grad=False)
        return head

    def use_kernels(self, choice: Choice) -> dict[str, str]:
        """Lets passes use CUDA kernels from now on; returns what computes each role."""
        self._kernel = attention_kernel(choice, self.dtype, [self.config.head_dim])
        return {"attention": self._kernel.how}

    def new_context(self) -> DraftContext:
        """An empty context for one request."""
        config = self.config
        return DraftContext(
            config.num_hidden_layers,
            config.num_key_value_heads,
            config.head_dim,
            self.dtype,
            self.device,
            block_size=config.block_size,
        )

    def extend(self, contexts: Sequence[tuple[DraftContext, int]], taps: Tensor) -> None:
        """Appends the context keys and values of committed tokens.

        Args:
            contexts: (context, n) of each request; its n rows of `taps` continue its context.
            taps: `[rows, taps * target hidden]`, the target's tapped states of these tokens.
        """
        if taps.shape[0] != sum(n for _, n in contexts):
            raise ConfigError(
                f"{taps.shape[0]} rows of taps for contexts that grow by {[n for _, n in contexts]}"
            )
        if taps.shape[0] == 0:
            return
        for context, n in contexts:  # all of them, before any of them changes
            context.require(context.length + n)
        taps = taps.to(self.dtype)
        rows = self._rotary_table().spans([(context.length, context.length + n) for context, n in contexts])
        keys_values = self._context(taps, rows)
        start = 0
        for context, n in contexts:
            end = context.length + n
            context.data[:, :, context.length : end] = keys_values[:, :, start : start + n]
            start += n
        for context, n in contexts:  # last, so that a failure leaves every context as it was
            context.length += n

    def _context(self, taps: Tensor, rows: Tensor) -> Tensor:
        """Context keys and values `[layers, 2 * key heads, rows, head_dim]`."""
        if self._frozen is not None:
            return self._frozen.context(taps, rows)
        context = self.hidden_norm(self.fc(taps))
        layers = []
        for attention in self._attentions():
            heads = torch.cat((attention.keys(context, rows), attention.values(context)), dim=1)
            layers.append(heads.transpose(0, 1))
        return torch.stack(layers)

    def _attentions(self) -> Sequence[KeysValues]:
        return [layer.self_attn for layer in decoder_layers(self.layers)]

    def block(self, anchors: Sequence[int], contexts: Sequence[DraftContext]) -> tuple[Tensor, Tensor]:
        """One block per request.

        Args:
            anchors: each request's last committed token.
            contexts: its context, which holds every token before the anchor.

        Returns:
            The backbone's output `[requests * state_rows, hidden]` (gamma rows each, or gamma + 1, see
            `DraftConfig`) and base logits `[requests * gamma, draft vocabulary]`.
        """
        config, size = self.config, self.config.block_size
        rows = self._rotary_table().spans([(context.length, context.length + size) for context in contexts])
        attention = CachedAttention(
            [(context, size) for context in contexts],
            config.num_attention_heads,
            config.windows,
            causal=config.causal,
            window_rule=config.window_rule,
            kernel=self._kernel,
        )
        masks = [config.mask_token_id] * (size - 1)
        ids = [token for anchor in anchors for token in (anchor, *masks)]
        x = self.embed(torch.tensor(ids, device=attention.device))
        hidden = self._layers(x, rows, attention)
        states = drafting = hidden
        if config.drop_anchor_slot:
            drafting = hidden.view(-1, size, config.hidden_size)[:, 1:].reshape(-1, config.hidden_size)
            states = hidden if config.state_rows == size else drafting
        return states, self.project(drafting)

    def _layers(self, x: Tensor, rows: Tensor, attention: CachedAttention) -> Tensor:
        if self._frozen is not None:
            return self._frozen.norm(self._frozen.layers(x, rows, attention))
        for index, layer in enumerate(self.layers):
            x = layer(x, rows, partial(attention.layer, index))
        return self.norm(x)  # type: ignore[no-any-return]

    def _rotary_table(self) -> RotaryTable:
        if self._rotary is None:
            self._rotary = RotaryTable(self.config.rope, self.config.head_dim, self.dtype, self.device)
        return self._rotary

    def _needed_target(self, what: str) -> Target:
        if self._target is None:
            raise ConfigError(f"this draft has no {what} of its own: bind it to a target first")
        return self._target
