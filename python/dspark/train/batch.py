"""What one training pass reads: sequences, the target's states, and where blocks start."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """B sequences, padded on the right to S positions. Nothing looks at the padding: no block starts there,
    and a block sees only what is before its anchor.

    Attributes:
        token_ids: `[B, S]`, int64.
        answers: `[B, S]`, bool: the target's own tokens, which a draft shall predict.
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
    """Where blocks start: `positions` `[B, N]`, ascending in each row; the real ones are `kept` `[B, N]`."""

    positions: Tensor
    kept: Tensor


@dataclass(frozen=True, slots=True)
class Labels:
    """What the M kept blocks of width K shall predict; every field is `[M, K]`.

    Attributes:
        positions: index of the predicting row in the flattened `[B * S]` states: slot k of a block at p
            predicts token p + k + 1, as the target's row p + k does.
        previous: the true token before each predicted one: p + k.
        tokens: the true token p + k + 1.
        counted: whether the slot is trained: an answer token, and so are all before it in the block
            (the reference's contiguous prefix).
    """

    positions: Tensor
    previous: Tensor
    tokens: Tensor
    counted: Tensor


ANCHORS_AT_ONCE = 32
"""The number of places is a multiple of this where answers are short, so that shapes do not differ by each
token (FlexAttention compiles for every shape)."""


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
    """`count` different anchors per sequence, uniformly: answer tokens whose next token is one too. Up to
    `share` of them are positions where a real verify pass failed.

    A sequence with fewer gives what it has. One generator for each sequence, so that the anchors do not
    depend on the batch they come in. After Draft-OPD: the anchors that decoding meets most after the draft
    was wrong are the hard ones.

    Args:
        failed: of each sequence, positions `[F]` of tokens by which the target replaced a drafted one.
    """
    rows = answers.shape[0]
    possible = (answers[:, :-1] & answers[:, 1:]).cpu()
    hardest = round(share * count)
    # Short answers have fewer: blocks that nobody keeps would take their share of every layer.
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
