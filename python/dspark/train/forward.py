"""The training pass of a draft: many blocks per sequence at once, teacher-forced."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dspark.draft import DSparkDraftModel
from dspark.layers.decoder import Attend, DecoderLayer, decoder_layers
from dspark.layers.rotary import RotaryTable
from dspark.train.attention import BlockAttention, block_attention, kind_for
from dspark.train.batch import Anchors, Batch, Labels, label_blocks

T = TypeVar("T")

LOGITS_AT_ONCE = 1 << 27
"""Half a gigabyte in float32. 2,048 blocks of 7 over 150,000 tokens would have 16 times as many, and losses
and gradients need several matrices of that size."""


class BlockOutputs(NamedTuple):
    """The outputs for M blocks of width K.

    Attributes:
        logits: `[M, K, draft vocabulary]`, Markov bias included, each slot given the true token before it.
        confidence: `[M, K]`, before the sigmoid; None without such a head.
        labels: what the blocks are to predict.
    """

    logits: Tensor
    confidence: Tensor | None
    labels: Labels


class TrainingPass(nn.Module):
    """A draft as it is trained: `DSparkDraftModel`'s own modules, over packed blocks.

    In decoding a block attends to a cache of one request; here N blocks of one sequence share its context
    keys and values, each bounded by its anchor. The rest is the same code.
    """

    def __init__(
        self, draft: DSparkDraftModel, *, detach_confidence: bool = False, attention: str | None = None
    ) -> None:
        """`detach_confidence` keeps the confidence loss out of the backbone (the reference lets it in)."""
        super().__init__()
        self.draft = draft
        self.detach_confidence = detach_confidence
        self.attention = attention
        self._rotary: RotaryTable | None = None

    def forward(
        self, batch: Batch, anchors: Anchors, width: int, read: Callable[[BlockOutputs], T]
    ) -> list[T]:
        """What `read` makes of the outputs, which are only there while it reads.

        All blocks at once, or, if that is more than `LOGITS_AT_ONCE`, some after the other: a backward pass
        then computes their outputs and `read` again.

        Args:
            width: inputs of each block: the anchor, then mask tokens.
        """
        labels = label_blocks(batch.token_ids, batch.answers, anchors, width)
        hidden = self._backbone(batch, anchors, width)[anchors.kept]
        blocks = max(1, LOGITS_AT_ONCE // (width * self.draft.config.draft_vocab_size))

        def piece(hidden: Tensor, labels: Labels) -> T:
            return read(self._heads(hidden, labels))

        if len(hidden) <= blocks:
            return [piece(hidden, labels)]
        pieces = zip(torch.split(hidden, blocks), labels.split(blocks), strict=True)
        return [checkpoint(piece, *one, use_reentrant=False, preserve_rng_state=False) for one in pieces]

    def _backbone(self, batch: Batch, anchors: Anchors, width: int) -> Tensor:
        """`[B, N, K, hidden]`."""
        draft, table = self.draft, self._table()
        count, length = batch.token_ids.shape
        blocks = anchors.positions.shape[1]
        anchored = batch.token_ids.gather(1, anchors.positions)
        ids = torch.full_like(anchored, draft.config.mask_token_id)[..., None].repeat(1, 1, width)
        ids[..., 0] = torch.where(anchors.kept, anchored, ids[..., 0])
        places = anchors.positions[..., None] + torch.arange(width, device=ids.device)
        rotation = table.at(places.flatten())
        context_rotation = table.span(0, length).repeat(1, count, 1)
        taps = batch.taps.reshape(count * length, -1).to(draft.dtype)
        context = draft.hidden_norm(draft.fc(taps))
        if self.attention is None:  # chosen once: on a GPU, this looks for a compiler
            self.attention = kind_for(ids.device, draft.config.head_dim)
        attention = block_attention(anchors, length, width, self.attention)
        x = draft.embed(ids.flatten())
        for layer in decoder_layers(draft.layers):
            x = layer(x, rotation, self._attend(layer, context, context_rotation, attention, count))
        return draft.norm(x).view(count, blocks, width, -1)  # type: ignore[no-any-return]

    def _attend(
        self, layer: DecoderLayer, context: Tensor, rotation: Tensor, attention: BlockAttention, count: int
    ) -> Attend:
        """The layer's attention. It computes context keys and values inside the layer's own forward, because
        sharded parameters are whole only there."""
        config, module = self.draft.config, layer.self_attn

        def attend(heads: Tensor) -> Tensor:
            heads = heads.view(count, -1, heads.shape[1], heads.shape[2])
            sizes = [config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads]
            queries, keys, values = torch.split(heads, sizes, 2)
            context_keys = module.keys(context, rotation).view(
                count, -1, config.num_key_value_heads, config.head_dim
            )
            context_values = module.values(context).view(
                count, -1, config.num_key_value_heads, config.head_dim
            )
            kind = queries.dtype
            out = attention(queries, context_keys.to(kind), context_values.to(kind), keys, values)
            return out.flatten(0, 1)

        return attend

    def _heads(self, hidden: Tensor, labels: Labels) -> BlockOutputs:
        draft = self.draft
        logits = draft.project(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)
        markov, head = draft.markov_head, draft.confidence_head
        if markov is not None:
            logits = markov.block(logits, labels.previous, hidden)
        if head is None:
            return BlockOutputs(logits, None, labels)
        read = hidden.detach() if self.detach_confidence else hidden
        return BlockOutputs(logits, head(read, labels.previous, markov), labels)

    def _table(self) -> RotaryTable:
        if self._rotary is None:
            config = self.draft.config
            self._rotary = RotaryTable(config.rope, config.head_dim, self.draft.dtype, self.draft.device)
        return self._rotary
