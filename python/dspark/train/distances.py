"""Cross-entropy and total variation of draft and target, row by row, with the memory of one matrix of logits.

Written out, softmax, difference, sum and their derivatives make a dozen matrices of rows times vocabulary;
this module keeps only the logits and computes in pieces that fit a cache, forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ROWS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class TeacherLaw:
    """The target's distribution at P rows, over the draft's vocabulary.

    Attributes:
        probabilities: `[P, draft vocabulary]`, f32: over the target's whole vocabulary, never renormalised,
            so that a row may sum to less than 1.
        missing: `[P]`: 1 minus that sum, the part that no draft with this vocabulary can have accepted.
    """

    probabilities: Tensor
    missing: Tensor

    @classmethod
    def of_logits(cls, logits: Tensor, normalisers: Tensor) -> TeacherLaw:
        """`logits` `[P, draft vocabulary]`, `normalisers` `[P]`: logsumexp over the whole vocabulary."""
        probabilities = (logits.float() - normalisers[:, None]).exp_()
        return cls(probabilities, (1.0 - probabilities.sum(1)).clamp_(min=0.0))


def distances(logits: Tensor, law: TeacherLaw, rows: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy at the true tokens, and the L1 distance of draft and target (twice the total variation).

    Args:
        logits: `[R, draft vocabulary]`, of the draft.
        rows: `[R]`, the row of `law` for each of them. tokens: `[R]`, the true draft ids, or -1 where the
            draft has none (there the cross-entropy is 0).

    Returns:
        Both `[R]`, f32, differentiable in `logits`. The acceptance rate of a slot is 1 - L1 / 2.
    """
    found: tuple[Tensor, Tensor] = _Distances.apply(logits, law.probabilities, law.missing, rows, tokens)
    return found


class _Distances(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, probabilities: Tensor, missing: Tensor, rows: Tensor, tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        count = len(logits)
        entropy = torch.empty(count, dtype=torch.float32, device=logits.device)
        apart, normalisers = torch.empty_like(entropy), torch.empty_like(entropy)
        for piece in _pieces(count):
            z = logits[piece].float()
            normaliser = torch.logsumexp(z, 1)
            q = (z - normaliser[:, None]).exp_()
            p = probabilities[rows[piece]]
            apart[piece] = p.sub_(q).abs_().sum(1) + missing[rows[piece]]
            known = tokens[piece] >= 0
            at_token = z.gather(1, tokens[piece].clamp(min=0)[:, None]).squeeze(1)
            entropy[piece] = torch.where(known, normaliser - at_token, 0.0)
            normalisers[piece] = normaliser
        ctx.save_for_backward(logits, probabilities, rows, tokens, normalisers)
        return entropy, apart

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, probabilities, rows, tokens, normalisers = ctx.saved_tensors
        by_entropy, by_apart = grads
        grad = torch.empty_like(logits)
        for piece in _pieces(len(logits)):
            q = (logits[piece].float() - normalisers[piece, None]).exp_()
            sign = (q - probabilities[rows[piece]]).sign_()
            # d|q - p|_1 / dz_i = q_i (s_i - sum_j q_j s_j); d(cross-entropy) / dz_i = q_i - [i is the token]
            sign.sub_((q * sign).sum(1, keepdim=True)).mul_(by_apart[piece, None])
            known = tokens[piece] >= 0
            ce = torch.where(known, by_entropy[piece], 0.0)[:, None]
            q.mul_(sign.add_(ce))
            q.scatter_add_(1, tokens[piece].clamp(min=0)[:, None], -ce)
            grad[piece] = q
        return grad, None, None, None, None


def _pieces(count: int) -> list[slice]:
    return [slice(start, min(start + ROWS_AT_ONCE, count)) for start in range(0, count, ROWS_AT_ONCE)]
