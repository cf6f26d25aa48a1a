"""The expected acceptance length of a draft, computed on held-out text without decoding.

Given the true tokens, the chance that slot k's token is accepted is 1 - TV(draft, target), and the expected
acceptance length of a block is 1 + the sum over k of the products of these chances up to k (the paper's
training metric, and the reference's). At temperature 0, a slot is accepted if the two argmaxes agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dspark.train.batch import Anchors, Batch, choose_anchors
from dspark.train.data.conversations import Conversation
from dspark.train.distances import TeacherLaw, distances
from dspark.train.examples import collate, seeded
from dspark.train.forward import BlockOutputs, TrainingPass
from dspark.train.head import teacher_logits
from dspark.train.teacher import AT_ONCE, Teacher

TEMPERATURES = 1.0, 0.7
"""Temperatures at which a run measures, beside 0."""

ROWS_AT_ONCE = 128


@dataclass(frozen=True, slots=True)
class _Held:
    """One held-out batch, with each row's normaliser at each temperature, and the target's argmax."""

    batch: Batch
    anchors: Anchors
    normalisers: dict[float, Tensor]
    argmax: Tensor


class HeldOut:
    """Held-out conversations, for which everything about the target is computed once."""

    def __init__(
        self,
        conversations: Sequence[Conversation],
        teacher: Teacher,
        head: Tensor,
        *,
        anchors: int,
        temperatures: Sequence[float],
        seed: int,
    ) -> None:
        """`anchors` per conversation, the same in every evaluation; `head`: see `LossPass`."""
        self.temperatures = tuple(temperatures)
        self._head = head
        self._held: list[_Held] = []
        for start in range(0, len(conversations), AT_ONCE):
            part = conversations[start : start + AT_ONCE]
            batch = collate(part, teacher.states(part), head.device)
            generators = [seeded(seed, start + i) for i in range(len(part))]
            chosen = choose_anchors(batch.answers, anchors, generators)
            self._held.append(_held(batch, chosen, teacher, self.temperatures))

    def measure(self, training: TrainingPass, width: int, bf16: bool = False) -> dict[str, Any]:
        """By temperature: `expected_length` over all blocks, `by_position`: mean acceptance of each slot."""
        was_training = training.training
        training.eval()
        sums = {t: _Sums(width) for t in (*self.temperatures, 0.0)}
        with torch.no_grad(), torch.autocast(self._head.device.type, torch.bfloat16, enabled=bf16):
            for one in self._held:

                def add(outputs: BlockOutputs, one: _Held = one) -> None:
                    for t in sums:
                        sums[t].add(self._accepted(one, outputs, training.draft.target_ids, t), outputs)

                training(one.batch, one.anchors, width, add)
        training.train(was_training)
        if hasattr(training, "reshard"):  # sharded: otherwise only a backward pass reshards
            training.reshard()  # type: ignore[operator]
        return {f"{t:g}": found.result() for t, found in sums.items()}

    def _accepted(self, one: _Held, outputs: BlockOutputs, ids: Tensor | None, t: float) -> Tensor:
        rows = outputs.labels.positions
        if t == 0.0:
            drafted = outputs.logits.argmax(-1)
            return ((drafted if ids is None else ids[drafted]) == one.argmax[rows]).float()
        needed, at = torch.unique(rows, return_inverse=True)
        logits = teacher_logits(one.batch.hidden.flatten(0, 1)[needed], self._head) / t
        law = TeacherLaw.of_logits(logits, one.normalisers[t][needed])
        drafts = outputs.logits.flatten(0, 1).float() / t
        _, apart = distances(drafts, law, at.flatten(), torch.full_like(at.flatten(), -1))
        return (1.0 - 0.5 * apart).clamp(0.0, 1.0).view(rows.shape)


def _held(batch: Batch, anchors: Anchors, teacher: Teacher, temperatures: Sequence[float]) -> _Held:
    hidden = batch.hidden.flatten(0, 1)
    predicting = torch.zeros_like(batch.answers)
    predicting[:, :-1] = batch.answers[:, 1:]
    rows = predicting.flatten().nonzero().squeeze(1)
    normalisers = {t: hidden.new_zeros(len(hidden), dtype=torch.float32) for t in temperatures}
    argmax = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
    with torch.inference_mode():
        for some in torch.split(rows, ROWS_AT_ONCE):
            logits = teacher.logits(hidden[some])
            argmax[some] = logits.argmax(-1)
            for t in temperatures:
                normalisers[t][some] = (logits / t).logsumexp(-1)
            del logits  # before the next ones are made
    return _Held(batch, anchors, normalisers, argmax)


class _Sums:
    def __init__(self, width: int) -> None:
        self._accepted, self._counted = torch.zeros(width), torch.zeros(width)
        self._length, self._blocks = 0.0, 0

    def add(self, accepted: Tensor, outputs: BlockOutputs) -> None:
        counted = outputs.labels.counted
        accepted = accepted * counted
        self._accepted += accepted.sum(0).cpu()
        self._counted += counted.sum(0).cpu()
        self._length += float((1.0 + accepted.cumprod(1).sum(1)).sum())
        self._blocks += len(counted)

    def result(self) -> dict[str, Any]:
        rates = self._accepted / self._counted.clamp(min=1)
        return {
            "expected_length": self._length / max(self._blocks, 1),
            "by_position": [round(float(rate), 4) for rate in rates],
            "blocks": self._blocks,
        }
