"""The gradient of a step: sums of weights known beforehand, one micro-batch's states at a time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dspark.draft import DSparkDraftModel
from dspark.pretrained import resolve
from dspark.target import load_target
from dspark.train import forward
from dspark.train.batch import Labels
from dspark.train.create import draft_from, trained_parameters
from dspark.train.data.conversations import Conversation
from dspark.train.distances import TeacherLaw
from dspark.train.forward import BlockOutputs, TrainingPass
from dspark.train.losses import Objective, loss_terms, reaching_weights, slot_weights
from dspark.train.step import Blocks, LossPass, Stepper, loss_pass_of
from dspark.train.teacher import States, Teacher
from dspark.train.world import World

DPACE = Objective(position_weights="dpace")


def outputs(logits: Tensor, counted: Tensor) -> BlockOutputs:
    blank = torch.zeros_like(counted, dtype=torch.int64)
    return BlockOutputs(logits, None, Labels(blank, blank, blank, counted))


@pytest.mark.parametrize("goal", [Objective(), DPACE])
def test_the_sums_of_weights_are_those_of_the_decay_and_the_mean_is_one(goal: Objective) -> None:
    torch.manual_seed(0)
    blocks, width, vocabulary = 6, 5, 11
    counted = torch.rand(blocks, width).lt(0.8).cumprod(1).bool()
    said = torch.randint(-1, 2, (blocks, width))
    law = TeacherLaw.of_logits(torch.randn(3, vocabulary), torch.full((3,), 4.0))
    rows = torch.zeros(blocks, width, dtype=torch.int64)
    # All tokens are equally likely: whatever the weights, the mean of the cross-entropy is that of each slot.
    terms = loss_terms(outputs(torch.zeros(blocks, width, vocabulary), counted), law, rows, said, goal)
    decayed = slot_weights(counted, goal.decay)
    assert torch.allclose(terms.weight, decayed.sum())
    assert torch.allclose(terms.said_weight, (decayed * (said >= 0)).sum())
    assert float(terms.cross_entropy / terms.said_weight) == pytest.approx(math.log(vocabulary), rel=1e-5)
    assert bool((said[counted] < 0).any())


def test_a_token_that_the_draft_cannot_say_is_never_reached() -> None:
    counted = torch.ones(1, 3, dtype=torch.bool)
    law = TeacherLaw.of_logits(torch.zeros(1, 2), torch.ones(1))
    rows = torch.zeros(1, 3, dtype=torch.int64)
    found = []
    for said in ([0, 0, 0], [0, -1, 0]):
        entropies = torch.tensor([[1.0, 2.0, 4.0]])
        logits = torch.stack((torch.zeros(1, 3), entropies.exp().sub(1.0).log()), -1)
        terms = loss_terms(outputs(logits, counted), law, rows, torch.tensor([said]), DPACE)
        q = torch.exp(-entropies) * (torch.tensor([said]) >= 0)
        weights = reaching_weights(q, counted, 0.5) * (torch.tensor([said]) >= 0)
        mean = float((weights * entropies).sum() / weights.sum())
        assert float(terms.cross_entropy / terms.said_weight) == pytest.approx(mean, rel=1e-5)
        found.append(mean)
    assert found[0] != found[1]


class Source:
    """The target, and a record of when it was asked."""

    def __init__(self, teacher: Teacher, events: list[str]) -> None:
        self.teacher, self.events = teacher, events

    def states(self, conversations: Sequence[Conversation]) -> list[States]:
        self.events.append("states")
        return self.teacher.states(conversations)


class Recorded(torch.nn.Module):
    def __init__(self, inner: LossPass, events: list[str]) -> None:
        super().__init__()
        self.inner, self.events = inner, events

    def forward(self, *given: Any) -> Any:
        self.events.append("forward")
        return self.inner(*given)


def gradients(micro_batch: int, goal: Objective) -> tuple[dict[str, Tensor], list[str], float]:
    target = resolve("tiny", "target")
    draft = draft_from(resolve("tiny-draft", "draft"), target)
    events: list[str] = []
    source = Source(Teacher(load_target(target), draft.config.target_layer_ids), events)
    inner = loss_pass_of(draft, detach_confidence=False, attention=None)
    talk = [Conversation(np.arange(20 + i, 60 + 3 * i), ((4 + i, 40 + 2 * i),)) for i in range(4)]
    stepper = Stepper(
        Recorded(inner, events),
        inner,
        source,
        World(0, 1, torch.device("cpu")),
        blocks=Blocks(6, 4, context_noise=0.05),
        goal=goal,
        micro_batch=micro_batch,
        bf16=False,
        seed=1,
    )
    measured = stepper.gradient(0, talk, 0.0)
    found = {n: p.grad for n, p in trained_parameters(draft).items() if p.grad is not None}
    return found, events, measured.loss


@pytest.mark.parametrize("goal", [Objective(), DPACE])
def test_states_are_there_for_one_micro_batch_at_a_time(goal: Objective) -> None:
    one, events, loss = gradients(1, goal)
    assert events == ["states", "forward"] * 4
    all_at_once, events, same = gradients(4, goal)
    assert events == ["states", "forward"]
    assert loss == pytest.approx(same, rel=1e-5)
    for name, grad in all_at_once.items():
        assert torch.allclose(one[name], grad, atol=1e-5, rtol=1e-3), name


@pytest.mark.parametrize("goal", [Objective(), DPACE])
def test_a_large_vocabulary_is_processed_in_pieces_that_give_the_same_gradient(
    goal: Objective, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _, loss = gradients(2, goal)
    largest = []
    heads = TrainingPass._heads

    def watched(self: TrainingPass, hidden: Tensor, labels: Labels) -> BlockOutputs:
        outputs = heads(self, hidden, labels)
        largest.append(outputs.logits.numel())
        return outputs

    monkeypatch.setattr(TrainingPass, "_heads", watched)
    monkeypatch.setattr(forward, "LOGITS_AT_ONCE", 5 * 4 * draft_config().draft_vocab_size)
    pieces, _, same = gradients(2, goal)
    assert same == pytest.approx(loss, rel=1e-6)
    for name, grad in whole.items():
        assert torch.allclose(pieces[name], grad, atol=1e-6, rtol=1e-4), name
    # Two micro-batches of 12 blocks, 5 at a time, once in each direction.
    assert len(largest) == 2 * 3 * 2
    assert max(largest) == forward.LOGITS_AT_ONCE


class OneDevice(TorchFunctionMode):
    """A GPU's tensors are not indexed by a CPU's, nor the other way round; "meta" stands for a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.__setitem__, Tensor.__getitem__):
            assert len({one.device for one in args if isinstance(one, Tensor)}) == 1
        return func(*args, **(kwargs or {}))


def test_draft_ids_are_looked_up_where_the_head_is() -> None:
    config = dataclasses.replace(draft_config(), draft_vocab_size=3)
    with torch.device("meta"):
        training = TrainingPass(DSparkDraftModel(config))
        head = torch.zeros(3, config.hidden_size)
        ids, tokens = torch.zeros(3, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)
    with OneDevice():
        assert LossPass(training, head, ids).said(tokens).device == head.device


def draft_config() -> Any:
    return draft_from(resolve("tiny-draft", "draft"), resolve("tiny", "target")).config
