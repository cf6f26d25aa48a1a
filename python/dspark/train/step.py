"""The gradient of one step: micro-batches on every process, weighted as one batch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dspark.draft import DSparkDraftModel
from dspark.train.batch import Anchors, Batch, choose_anchors, label_blocks
from dspark.train.data.conversations import Conversation
from dspark.train.distances import TeacherLaw
from dspark.train.examples import StateSource, collate, framed, noisy, seeded
from dspark.train.forward import BlockOutputs, TrainingPass
from dspark.train.head import frozen_head, teacher_logits
from dspark.train.losses import Objective, Terms, joined, loss_terms, slot_weights
from dspark.train.world import World


@dataclass(frozen=True, slots=True)
class Blocks:
    """How blocks are laid into a sequence: `anchors` of them, `width` inputs wide; `failed_share` of the
    anchors where verify passes failed; uniform noise of size `context_noise` on the taps."""

    anchors: int
    width: int
    failed_share: float = 0.0
    context_noise: float = 0.0


class LossPass(nn.Module):
    """A training pass and its losses in one forward, so that torch's data parallelism sees all of it."""

    def __init__(self, training: TrainingPass, head: Tensor, target_ids: Tensor | None) -> None:
        """`head`: the draft's frozen head, which is also the teacher's over the draft's vocabulary."""
        super().__init__()
        self.training_pass = training
        self._head = head
        config = training.draft.config
        self._draft_of = torch.full((config.vocab_size,), -1, dtype=torch.int64, device=head.device)
        ids = torch.arange(len(head), device=head.device)
        self._draft_of[ids if target_ids is None else target_ids.to(head.device)] = ids

    def said(self, tokens: Tensor) -> Tensor:
        """Draft ids of target tokens, -1 where the draft's vocabulary has none."""
        return self._draft_of[tokens]

    def forward(self, batch: Batch, anchors: Anchors, width: int, goal: Objective) -> Terms:
        def terms(outputs: BlockOutputs) -> Terms:
            labels = outputs.labels
            # Compute each row of the teacher once, however many of these blocks read it.
            needed, rows = torch.unique(labels.positions, return_inverse=True)
            logits = teacher_logits(batch.hidden.flatten(0, 1)[needed], self._head)
            law = TeacherLaw.of_logits(logits, batch.normalisers.flatten()[needed])
            return loss_terms(outputs, law, rows, self.said(labels.tokens), goal)

        return joined(self.training_pass(batch, anchors, width, terms))


@dataclass(slots=True)
class Measured:
    """What a step reports, summed over all processes."""

    loss: float
    terms: dict[str, float]
    expected_length: float
    by_position: list[float]
    tokens: int


@dataclass(frozen=True, slots=True)
class _Laid:
    """A micro-batch before its states are read: its generators, which then draw the noise, its anchors, and
    its sums of weights `[2]` (of all slots, and of those whose token is in the draft's vocabulary)."""

    conversations: list[Conversation]
    generators: list[torch.Generator]
    anchors: Anchors
    weights: Tensor


class Stepper:
    """Computes gradients; applying them is up to the optimiser."""

    def __init__(
        self,
        module: nn.Module,
        loss_pass: LossPass,
        source: StateSource,
        world: World,
        *,
        blocks: Blocks,
        goal: Objective,
        micro_batch: int,
        bf16: bool,
        seed: int,
    ) -> None:
        """`module` is `loss_pass`, or what wraps it to distribute it; `micro_batch`: sequences at a time."""
        self._module, self._loss_pass, self._source, self._world = module, loss_pass, source, world
        self._blocks, self._goal, self._seed = blocks, goal, seed
        self._micro_batch, self._bf16 = micro_batch, bf16

    def gradient(self, step: int, sequences: Sequence[Conversation], progress: float) -> Measured:
        """Accumulates the gradient of the mean loss over `sequences`, of which every process takes its part.

        Everything random depends on (seed, step, place in `sequences`), so neither the number of processes
        nor the size of micro-batches changes it.
        """
        world = self._world
        mine = range(world.rank, len(sequences), world.size)
        parts = [mine[i : i + self._micro_batch] for i in range(0, len(mine), self._micro_batch)]
        # Anchors and weights first: states, which are large, are in memory for one micro-batch at a time.
        laid = [self._lay(step, part, sequences) for part in parts]
        weights = torch.zeros(2, device=world.device)
        for one in laid:
            weights += one.weights
        weights = world.sum(weights)
        factors = self._goal.factors(progress)
        found: list[Terms] = []
        for index, one in enumerate(laid):
            last = index == len(laid) - 1
            batch = collate(one.conversations, self._source.states(one.conversations), world.device)
            batch = noisy(batch, self._blocks.context_noise, one.generators)
            hold = nullcontext() if last else getattr(self._module, "no_sync", nullcontext)()
            with hold:
                with torch.autocast(world.device.type, torch.bfloat16, enabled=self._bf16):
                    terms = self._module(batch, one.anchors, self._blocks.width, self._goal)
                # Data parallelism divides by the number of processes, but `weights` already sums over all.
                (terms.loss(factors, weights[0], weights[1]) * world.size).backward()
            found.append(Terms(*(value.detach() for value in terms)))
            del batch  # before the next one's states are read
        tokens = sum(len(one.tokens) for one in sequences)
        return self._measure(found, weights, factors, tokens)

    def _lay(self, step: int, part: range, sequences: Sequence[Conversation]) -> _Laid:
        chosen = [sequences[i] for i in part]
        ids, answers = (tensor.to(self._world.device) for tensor in framed(chosen))
        generators = [seeded(self._seed, step, i) for i in part]
        blocks = self._blocks
        failed = [torch.from_numpy(one.failed) for one in chosen]
        anchors = choose_anchors(answers, blocks.anchors, generators, failed, blocks.failed_share)
        labels = label_blocks(ids, answers, anchors, blocks.width)
        weights = slot_weights(labels.counted, self._goal.decay)
        said = self._loss_pass.said(labels.tokens) >= 0
        return _Laid(chosen, generators, anchors, torch.stack((weights.sum(), (weights * said).sum())))

    def _measure(
        self, found: list[Terms], weights: Tensor, factors: tuple[float, float, float], tokens: int
    ) -> Measured:
        width = self._blocks.width
        sums = torch.zeros(5 + 2 * width, dtype=torch.float64, device=self._world.device)
        for terms in found:
            reached = (terms.accepted * terms.counted).cumprod(1).sum(1)
            sums[:5] += torch.stack(
                (terms.cross_entropy, terms.distance, terms.confidence, (1 + reached).sum(),
                 terms.accepted.new_tensor(len(reached)))
            )  # fmt: skip
            sums[5 : 5 + width] += (terms.accepted * terms.counted).sum(0)
            sums[5 + width :] += terms.counted.sum(0)
        sums = self._world.sum(sums)
        weight, said = float(weights[0]), float(weights[1])
        terms_mean = {
            "cross_entropy": float(sums[0]) / max(said, 1e-6),
            "distance": float(sums[1]) / max(weight, 1e-6),
            "confidence": float(sums[2]) / max(weight, 1e-6),
        }
        blocks = max(float(sums[4]), 1.0)
        return Measured(
            loss=sum(f * v for f, v in zip(factors, terms_mean.values(), strict=True)),
            terms=terms_mean,
            expected_length=float(sums[3]) / blocks,
            by_position=(sums[5 : 5 + width] / sums[5 + width :].clamp(min=1)).tolist(),
            tokens=tokens,
        )


def loss_pass_of(draft: DSparkDraftModel, *, detach_confidence: bool, attention: str | None) -> LossPass:
    """The pass that trains a draft made by `dspark.train.create`."""
    training = TrainingPass(draft, detach_confidence=detach_confidence, attention=attention)
    return LossPass(training, frozen_head(draft), draft.target_ids)
