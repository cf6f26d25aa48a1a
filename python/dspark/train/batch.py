"""What one training pass reads: sequences, the target's states, and where blocks start."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """B sequences, padded on the right to S positions. Nothing reads the padding: no block starts there, and
    a block sees only what is before its anchor.

    Attributes:
        token_ids: `[B, S]`, int64.
        answers: `[B, S]`, bool: the target's own tokens, which a draft is to predict.
        taps: `[B, S, taps * hidden]`: the target's tapped states.
        hidden: `[B, S, hidden]`: its last states, after the final norm; row t predicts token t + 1.
        normalisers: `[B, S]`, f32: logsumexp of the target's logits over its whole vocabulary at each row.
    """

    token_ids: Tensor
    answers: Tensor
    taps: Tensor
    hidden: Tensor
    normalisers: Tensor

    def to(self, device: torch.device) -> Batch:
        """The same on another device."""
        return Batch(*(getattr(self, name).to(device) for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class Anchors:
    """Where blocks start: `positions` `[B, N]`, ascending in each row; `kept` `[B, N]`: the real ones."""

    positions: Tensor
    kept: Tensor


@dataclass(frozen=True, slots=True)
class Labels:
    """What the M kept blocks of width K are to predict; every field is `[M, K]`.

    Attributes:
        positions: index of the predicting row in the flattened `[B * S]` states: slot k of a block at p
            predicts token p + k + 1, as the target's row p + k does.
        previous: the true token before each predicted one: p + k.
        tokens: the true token p + k + 1.
        counted: whether the slot is trained: its token and all before it in the block are answer tokens
            (the reference's contiguous prefix).
    """

    positions: Tensor
    previous: Tensor
    tokens: Tensor
    counted: Tensor

    def split(self, blocks: int) -> list[Labels]:
        """Those of `blocks` blocks at a time."""
        parts = (getattr(self, name).split(blocks) for name in self.__slots__)
        return [Labels(*part) for part in zip(*parts, strict=True)]


ANCHORS_AT_ONCE = 32
"""If answers are short, the number of places for anchors is a multiple of this, so that shapes do not change
with every token (FlexAttention compiles for every shape)."""


def label_blocks(token_ids: Tensor, answers: Tensor, anchors: Anchors, width: int) -> Labels:
    """The labels of all kept blocks, in the order of `anchors.kept.nonzero()`."""
    length = token_ids.shape[1]
    sequence, column = anchors.kept.nonzero(as_tuple=True)
    at = anchors.positions[sequence, column, None] + torch.arange(width + 1, device=token_ids.device)
    inside = at < length
    at = at.clamp(max=length - 1)
    tokens = token_ids[sequence[:, None], at]
    counted = (answers[sequence[:, None], at] & inside)[:, 1:].cumprod(1).bool()
    return Labels(sequence[:, None] * length + at[:, :-1], tokens[:, :-1], tokens[:, 1:], counted)


def choose_anchors(
    answers: Tensor,
    count: int,
    generators: list[torch.Generator],
    failed: list[Tensor] | None = None,
    share: float = 0.0,
) -> Anchors:
    """Draws `count` different anchors per sequence, uniformly from the answer tokens that are followed by
    another one. Up to `share` of them are positions where a real verify pass failed.

    A sequence with fewer such tokens gives all it has. Each sequence has its own generator, so that its
    anchors do not depend on the batch it is in. The share follows Draft-OPD: the anchors that decoding meets
    most after the draft was wrong are the hard ones.

    Args:
        failed: for each sequence, positions `[F]` of the tokens that replaced a drafted one.
    """
    rows = answers.shape[0]
    possible = (answers[:, :-1] & answers[:, 1:]).cpu()
    hardest = round(share * count)
    # Short answers have fewer candidates, and blocks that are not kept would still cost time in every layer.
    most = -(-int(possible.sum(1).max()) // ANCHORS_AT_ONCE) * ANCHORS_AT_ONCE
    count = max(1, min(count, most))
    positions = torch.zeros(rows, count, dtype=torch.int64)
    kept = torch.zeros(rows, count, dtype=torch.bool)
    for row in range(rows):
        candidates = possible[row].nonzero().squeeze(1)
        order = torch.randperm(len(candidates), generator=generators[row])
        if failed is not None and share > 0.0:
            hard = torch.isin(candidates[order], failed[row])
            order = _hard_first(order, hard, hardest)
        chosen = candidates[order[:count]].sort().values
        positions[row, : len(chosen)] = chosen
        kept[row, : len(chosen)] = True
    return Anchors(positions.to(answers.device), kept.to(answers.device))


def _hard_first(order: Tensor, hard: Tensor, most: int) -> Tensor:
    """The order with at most `most` of the hard ones moved to the front."""
    front = hard & (hard.cumsum(0) <= most)
    return torch.cat((order[front], order[~front]))
