"""The three losses of the paper (section 3.3, equations 9 to 12), and their weights by position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.train.distances import TeacherLaw, distances
from dspark.train.forward import BlockOutputs

TINY = 1e-6
"""Added to the sums of weights, as in the reference, so that a batch without labels does not divide by 0."""


SMOOTHING = 0.5
"""The a in D-PACE's (1 - a) q + a."""


@dataclass(frozen=True, slots=True)
class Objective:
    """What is minimised.

    Attributes:
        cross_entropy, distance, confidence: factors of the terms (paper: 0.1, 0.9, 1.0).
        decay: weight exp(-k / decay) of slot k = 0, 1, ...; 0: all slots alike.
        position_weights: "decay", or "dpace".
        early_cross_entropy, early_share: another factor for the cross-entropy, with the rest to 1 for the
            distance, in this first share of the run: total variation has weak gradients while the draft is
            poor. None: the same factors throughout.
    """

    cross_entropy: float = 0.1
    distance: float = 0.9
    confidence: float = 1.0
    decay: float = 4.0
    position_weights: str = "decay"
    early_cross_entropy: float | None = None
    early_share: float = 0.25

    def factors(self, progress: float) -> tuple[float, float, float]:
        """The factors of the three terms, `progress` (0 to 1) into the run."""
        early = self.early_cross_entropy
        if early is None or progress >= self.early_share:
            return self.cross_entropy, self.distance, self.confidence
        return early, 1.0 - early, self.confidence


class Terms(NamedTuple):
    """Weighted sums of the losses over some blocks, and what is worth watching.

    Attributes:
        cross_entropy, distance, confidence: sums of weight times loss. weight: the sum of the weights of
            distance and confidence. said_weight: that of the cross-entropy, without slots whose true token
            is outside the draft's vocabulary.
        accepted: `[M, K]`, chance 1 - TV that the slot's token is accepted, detached. counted: `[M, K]`.
    """

    cross_entropy: Tensor
    distance: Tensor
    confidence: Tensor
    weight: Tensor
    said_weight: Tensor
    accepted: Tensor
    counted: Tensor

    def loss(self, factors: tuple[float, float, float], weight: Tensor, said_weight: Tensor) -> Tensor:
        """The weighted mean. The weights may be sums over more blocks than these (other micro-batches, other
        processes); the result is then these blocks' share of the mean."""
        ce, distance, confidence = factors
        return ce * self.cross_entropy / (said_weight + TINY) + (
            distance * self.distance + confidence * self.confidence
        ) / (weight + TINY)


def joined(parts: Sequence[Terms]) -> Terms:
    """The terms of all blocks, from those of some at a time."""
    columns = dict(zip(Terms._fields, zip(*parts, strict=True), strict=True))
    each = {name: torch.cat(columns.pop(name)) for name in ("accepted", "counted")}
    return Terms(**{name: torch.stack(sums).sum(0) for name, sums in columns.items()}, **each)


def slot_weights(counted: Tensor, decay: float) -> Tensor:
    """`[M, K]`: exp(-k / decay) where a slot counts, else 0."""
    slots = torch.arange(counted.shape[1], device=counted.device, dtype=torch.float32)
    return counted * (torch.exp(-slots / decay) if decay > 0 else torch.ones_like(slots))


def loss_terms(outputs: BlockOutputs, law: TeacherLaw, rows: Tensor, said: Tensor, goal: Objective) -> Terms:
    """The terms of M blocks of width K.

    Args:
        rows: `[M, K]`, the law's row of each slot. said: `[M, K]`, the true token's draft id, -1 if it has
            none.
    """
    shape = rows.shape
    counted = outputs.labels.counted
    entropy, apart = distances(outputs.logits.flatten(0, 1), law, rows.flatten(), said.flatten())
    entropy, apart = entropy.view(shape), apart.view(shape)
    accepted = (1.0 - 0.5 * apart.detach()).clamp(0.0, 1.0)
    weights = slot_weights(counted, goal.decay)
    said_weights = weights * (said >= 0)
    if goal.position_weights == "dpace":
        true = torch.where(said >= 0, torch.exp(-entropy.detach()), 0.0)
        reached = reaching_weights(true, counted, SMOOTHING)
        # Scaled to the decay's sums, by which `Stepper` divides: it takes them before any forward pass.
        weights, said_weights = scaled(reached, weights), scaled(reached * (said >= 0), said_weights)
    confidence = apart.new_zeros(())
    if outputs.confidence is not None:
        errors = F.binary_cross_entropy_with_logits(outputs.confidence.float(), accepted, reduction="none")
        confidence = (errors * weights).sum()
    return Terms(
        cross_entropy=(entropy * said_weights).sum(),
        distance=(apart * weights).sum(),
        confidence=confidence,
        weight=weights.sum(),
        said_weight=said_weights.sum(),
        accepted=accepted,
        counted=counted,
    )


def reaching_weights(q: Tensor, counted: Tensor, smoothing: float) -> Tensor:
    """D-PACE (as in speculators): slot k weighs the sum over j >= k of the products up to j of
    s = (1 - a) q + a, where q `[M, K]` is the draft's probability of the true token (0 if it lacks that).

    This is how much the expected accepted length changes with slot k.
    """
    smooth = (1.0 - smoothing) * q + smoothing
    reached = torch.where(counted, smooth, 1.0).cumprod(1) * counted
    return reached.flip(1).cumsum(1).flip(1) * counted


def scaled(found: Tensor, weights: Tensor) -> Tensor:
    """`found` `[M, K]`, each block scaled to its sum of `weights`: losses stay comparable, and the sums are
    known before the draft has run."""
    return found * (weights.sum(1, keepdim=True) / found.sum(1, keepdim=True).clamp(min=TINY))
