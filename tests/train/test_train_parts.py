"""The parts of training against what they are defined to be."""

from __future__ import annotations

import itertools
import math
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.errors import ConfigError
from dspark.pretrained import resolve
from dspark.target import load_target
from dspark.target.config import TargetConfig
from dspark.train import acceptance, forward
from dspark.train.acceptance import HeldOut
from dspark.train.attention import block_attention
from dspark.train.batch import Anchors, Batch, choose_anchors, label_blocks
from dspark.train.create import draft_from
from dspark.train.data.conversations import Conversation
from dspark.train.distances import ROWS_AT_ONCE, TeacherLaw, distances
from dspark.train.examples import Order, noisy, seeded
from dspark.train.forward import TrainingPass
from dspark.train.head import embeddings_and_head, teacher_logits
from dspark.train.losses import Objective, reaching_weights, scaled, slot_weights
from dspark.train.muon import Float32Muon, muon_of
from dspark.train.optimiser import Optimiser, Rate
from dspark.train.shape import Shape, default_taps, draft_config
from dspark.train.teacher import Teacher
from places import DATA


def generators(count: int) -> list[torch.Generator]:
    return [seeded(7, i) for i in range(count)]


def test_distances_and_their_gradients_are_autograd_s() -> None:
    torch.manual_seed(0)
    rows, vocabulary, drafted = 2 * ROWS_AT_ONCE + 3, 40, 24
    ids = torch.randperm(vocabulary)[:drafted].sort().values
    teacher = torch.randn(9, vocabulary)
    law = TeacherLaw.of_logits(teacher[:, ids], teacher.logsumexp(1))
    at = torch.randint(0, 9, (rows,))
    tokens = torch.randint(-1, drafted, (rows,))
    ours = (2 * torch.randn(rows, drafted)).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    weights = torch.rand(2, rows)
    entropy, apart = distances(ours, law, at, tokens)
    (weights[0] * entropy + weights[1] * apart).sum().backward()

    # Over the whole vocabulary, where the draft gives what it cannot say nothing.
    q = torch.zeros(rows, vocabulary).index_copy(1, ids, theirs.softmax(1))
    l1 = (q - teacher.softmax(1)[at]).abs().sum(1)
    ce = F.cross_entropy(theirs, tokens, reduction="none", ignore_index=-1)
    (weights[0] * ce + weights[1] * l1).sum().backward()
    assert torch.allclose(entropy, ce, atol=1e-5)
    assert torch.allclose(apart, l1, atol=1e-5)
    assert ours.grad is not None
    assert theirs.grad is not None
    assert torch.allclose(ours.grad, theirs.grad, atol=1e-6)
    assert float(law.missing.min()) > 0.01


@pytest.mark.parametrize("kept", [(3, 3), (3, 1)])
def test_both_attentions_of_a_cpu_agree(kept: tuple[int, int]) -> None:
    torch.manual_seed(1)
    batch, length, width, blocks, heads, kv, dim = 2, 11, 3, 3, 4, 2, 8
    positions = torch.tensor([[0, 4, 9], [2, 5, 7]])
    real = torch.arange(blocks) < torch.tensor(kept)[:, None]
    anchors = Anchors(positions, real)
    q = torch.randn(batch, blocks * width, heads, dim)
    k, v = torch.randn(2, batch, blocks * width, kv, dim)
    context_k, context_v = torch.randn(2, batch, length, kv, dim)
    found = [
        block_attention(anchors, length, width, kind)(q, context_k, context_v, k, v)
        for kind in ("products", "sdpa")
    ]
    assert torch.allclose(*found, atol=1e-5)
    # The future of an anchor, itself included, changes nothing.
    context_k[:, 9:], context_v[:, 9:] = 100.0, 100.0
    again = block_attention(anchors, length, width, "products")(q, context_k, context_v, k, v)
    assert torch.equal(again, found[0])


def test_anchors_are_answer_tokens_followed_by_one_and_do_not_depend_on_the_batch() -> None:
    answers = torch.zeros(2, 30, dtype=torch.bool)
    answers[0, 5:12] = True
    answers[1, 20:] = True
    found = choose_anchors(answers, 8, generators(2))
    assert found.kept.sum(1).tolist() == [6, 8]
    for row in range(2):
        places = found.positions[row][found.kept[row]]
        assert (answers[row, places] & answers[row, places + 1]).all()
        assert (places.diff() > 0).all()
    alone = choose_anchors(answers[1:], 8, [seeded(7, 1)])
    assert torch.equal(alone.positions[0], found.positions[1])


def test_failed_positions_are_taken_first_up_to_their_share() -> None:
    answers = torch.ones(1, 100, dtype=torch.bool)
    failed = [torch.arange(10, 90, 2)]
    found = choose_anchors(answers, 16, generators(1), failed, 0.5)
    hard = torch.isin(found.positions[0], failed[0])
    assert 8 <= int(hard.sum()) < 16
    everything = choose_anchors(answers, 16, generators(1), failed, 1.0)
    assert torch.isin(everything.positions[0], failed[0]).all()


def test_labels_end_with_the_answer() -> None:
    ids = torch.arange(10)[None]
    answers = torch.tensor([[False, True, True, True, True, False, False, True, True, True]])
    anchors = Anchors(torch.tensor([[1, 3, 8]]), torch.tensor([[True, True, True]]))
    labels = label_blocks(ids, answers, anchors, 4)
    assert labels.counted.sum(1).tolist() == [3, 1, 1]
    assert labels.tokens[0].tolist() == [2, 3, 4, 5]
    assert labels.previous[0].tolist() == labels.positions[0].tolist() == [1, 2, 3, 4]


def test_weights_by_position() -> None:
    counted = torch.tensor([[True, True, True, False]])
    decayed = slot_weights(counted, 4.0)
    assert torch.allclose(decayed, torch.tensor([[1.0, math.exp(-0.25), math.exp(-0.5), 0.0]]))
    assert slot_weights(counted, 0.0).tolist() == [[1.0, 1.0, 1.0, 0.0]]
    q = torch.tensor([[0.5, 0.25, 1.0, 0.1]])
    found = scaled(reaching_weights(q, counted, 0.5), decayed)
    s = [0.75, 0.625, 1.0]  # (1 - a) q + a
    reached = [s[0], s[0] * s[1], s[0] * s[1] * s[2]]
    expected = torch.tensor([[sum(reached), sum(reached[1:]), reached[2], 0.0]])
    assert torch.allclose(found / found.sum(), expected / expected.sum())
    assert torch.allclose(found.sum(), decayed.sum())


def test_the_first_quarter_may_have_more_cross_entropy() -> None:
    goal = Objective(early_cross_entropy=0.7)
    assert goal.factors(0.0) == pytest.approx((0.7, 0.3, 1.0))
    assert goal.factors(0.25) == (0.1, 0.9, 1.0)
    assert Objective().factors(0.0) == (0.1, 0.9, 1.0)


def test_the_rate_warms_up_and_falls_to_nothing() -> None:
    rate = Rate(1.0, 100, warmup=0.1)
    found = [rate.at(step) for step in range(100)]
    assert found[0] == pytest.approx(0.1)
    assert max(found) == pytest.approx(1.0)
    assert found.index(max(found)) in (9, 10)
    assert found[-1] < 0.001
    assert all(a >= b for a, b in itertools.pairwise(found[10:]))


def test_the_rate_may_stay_at_its_peak_until_it_cools_down() -> None:
    rate = Rate(2.0, 100, warmup=0.1, cooldown=0.2)
    found = [rate.at(step) for step in range(101)]
    assert found[9:81] == [2.0] * 72
    assert found[85] == pytest.approx(2.0 * (1.0 - 0.5))  # a quarter of the way
    assert found[100] == 0.0
    assert all(a > b for a, b in itertools.pairwise(found[80:]))
    # Longer, it was the same run so far.
    longer = Rate(2.0, 200, warmup=0.05, cooldown=0.1)
    assert [longer.at(step) for step in range(80)] == found[:80]


def test_every_epoch_shows_everything_once() -> None:
    order = Order(10, 3)
    epochs = [[order[10 * e + i] for i in range(10)] for e in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert Order(10, 3)[25] == epochs[2][5]


def parameter(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(shape))


def test_gradients_that_are_not_finite_are_not_applied() -> None:
    weight = parameter(3)
    optimiser = Optimiser({"w": weight})
    weight.grad = torch.tensor([1.0, float("nan"), 0.0])
    assert math.isnan(optimiser.step(0.1, 1.0))
    assert weight.tolist() == [1.0, 1.0, 1.0]


def test_muon_takes_the_backbone_s_matrices_alone() -> None:
    names = {"fc.weight": (4, 4), "markov_head.markov_w1.weight": (4, 2), "norm.weight": (4,)}
    parameters = {name: parameter(*shape) for name, shape in names.items()}
    optimiser = Optimiser(parameters, muon=True)
    adam, muon = optimiser.parts
    assert [tuple(p.shape) for p in adam.param_groups[0]["params"]] == [(4, 2), (4,)]
    assert muon.param_groups[0]["params"] == [parameters["fc.weight"]]
    for p in parameters.values():
        p.grad = torch.randn(p.shape)
    optimiser.step(0.1, 1.0)
    assert all(not torch.equal(p, torch.ones_like(p)) for p in parameters.values())


@pytest.mark.parametrize("shape", [(64, 256), (256, 64), (96, 96)])
def test_muon_in_float32_steps_as_torch_s_in_bfloat16(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    start = torch.randn(shape) * 0.02
    moved = []
    for kind in (torch.optim.Muon, Float32Muon):
        torch.manual_seed(1)
        weight, idle = torch.nn.Parameter(start.clone()), parameter(2, 2)
        optimiser = kind([weight, idle], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        for _ in range(5):
            weight.grad = torch.randn(shape)
            optimiser.step()
        assert list(optimiser.state) == [weight]
        assert torch.equal(idle, torch.ones(2, 2))
        moved.append(weight.detach() - start)
    assert (moved[0] - moved[1]).norm() < 0.02 * moved[0].norm()  # bfloat16's rounding: measured 0.009


@pytest.mark.parametrize("fast", [False, True])
def test_muon_runs_in_bfloat16_where_that_is_faster(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark.train.muon.has_fast_products", lambda *_: fast)
    assert type(muon_of([parameter(2, 3)], 0.0)) is (torch.optim.Muon if fast else Float32Muon)


def test_taps_spread_as_the_published_ones() -> None:
    assert default_taps(36) == (1, 9, 17, 25, 33)
    assert default_taps(30) == (1, 8, 14, 21, 27)
    assert default_taps(6) == (1, 2, 3)
    assert default_taps(2) == (0,)


@pytest.mark.parametrize(
    ("shape", "named"),
    [
        (Shape(mask_token_id=0, layers=0), "layers"),
        (Shape(mask_token_id=0, block_size=8, training_block_size=4), "block_size"),
        (Shape(mask_token_id=0, markov_head_type="lstm"), "markov_head_type"),
        (Shape(mask_token_id=0, markov_rank=0), "markov_rank"),
        (Shape(mask_token_id=0, taps=(2, 1)), "taps"),
        (Shape(mask_token_id=0, taps=(5,)), "taps"),
        (Shape(mask_token_id=600), "mask_token_id"),
        (Shape(mask_token_id=0, vocabulary=513), "vocabulary"),
    ],
)
def test_shapes_that_cannot_be(shape: Shape, named: str, tiny_config: TargetConfig) -> None:
    with pytest.raises(ConfigError, match=named):
        draft_config(shape, tiny_config)


@pytest.fixture(scope="module")
def tiny_config() -> TargetConfig:
    return TargetConfig.from_directory(resolve("tiny", "target"))


def test_noise_is_bounded_and_repeatable() -> None:
    zeros: Tensor = torch.zeros(2, 5, 6)
    flat = torch.zeros(2, 5)
    batch = Batch(flat.long(), flat.bool(), zeros, zeros, flat)
    found = noisy(batch, 0.05, generators(2)).taps
    assert 0.02 < float(found.abs().max()) <= 0.025
    assert torch.equal(found, noisy(batch, 0.05, generators(2)).taps)
    assert noisy(batch, 0.0, generators(2)) is batch


def test_a_teacher_in_16_bits_normalises_by_float32_logits() -> None:

    from dspark.pretrained import resolve
    from dspark.target import load_target

    path = resolve("tiny", "target")
    target = load_target(path, dtype=torch.bfloat16)
    head = embeddings_and_head(path, (512, 96), None)[1]
    one = Conversation(np.arange(20, 60), ((5, 40),))
    for given, worst in ((head, 1e-5), (None, 1.0)):
        (states,) = Teacher(target, (0,), given).states([one])
        law = TeacherLaw.of_logits(teacher_logits(states.hidden, head), states.normalisers)
        off = float((law.probabilities[4:].sum(1) - 1.0).abs().max())
        assert off < worst
        assert (off > 1e-4) == (given is None)


@pytest.mark.parametrize("name", ["tiny", "hybrid"])
def test_a_pass_gives_hidden_states_in_place_of_logits(name: str) -> None:
    path = resolve("tiny", "target") if name == "tiny" else DATA / name / "target"
    target = load_target(path)
    ids = torch.arange(10, 30)
    with torch.inference_mode():
        logits, taps = target(ids, [(target.new_cache(), 12), (target.new_cache(), 8)], (0, 2))
        hidden, again = target(ids, [(target.new_cache(), 12), (target.new_cache(), 8)], (0, 2), "hidden")
        assert torch.allclose(target.project(hidden), logits, atol=1e-4)
        assert taps is not None
        assert again is not None
        assert torch.equal(taps, again)


def test_held_out_logits_are_in_memory_a_piece_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    path = resolve("tiny", "target")
    teacher, made = Teacher(load_target(path), (0,)), []
    logits = Teacher.logits

    def counted(self: Teacher, hidden: Tensor) -> Tensor:
        assert not [one for one in made if one() is not None]
        found = logits(self, hidden)
        made.append(weakref.ref(found))
        return found

    some = [Conversation(np.arange(20, 60), ((5, 40),))]
    head = embeddings_and_head(path, (512, 96), None)[1]
    whole = HeldOut(some, teacher, head, anchors=4, temperatures=(1.0,), seed=0)
    monkeypatch.setattr(acceptance, "ROWS_AT_ONCE", 8)
    states = teacher.states(some)
    monkeypatch.setattr(teacher, "states", lambda _: states)
    monkeypatch.setattr(Teacher, "logits", counted)
    pieces = HeldOut(some, teacher, head, anchors=4, temperatures=(1.0,), seed=0)
    assert len(made) == 5
    for one, other in zip(whole._held, pieces._held, strict=True):
        assert torch.allclose(one.normalisers[1.0], other.normalisers[1.0], atol=1e-5)
        assert torch.equal(one.argmax, other.argmax)


def test_held_out_blocks_are_measured_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    path = resolve("tiny", "target")
    draft = draft_from(resolve("tiny-draft", "draft"), path)
    head = embeddings_and_head(path, (512, 96), None)[1]
    some = [Conversation(np.arange(20, 60), ((5, 40),)), Conversation(np.arange(100, 160), ((9, 60),))]
    teacher = Teacher(load_target(path), draft.config.target_layer_ids)
    held = HeldOut(some, teacher, head, anchors=9, temperatures=(0.7,), seed=0)
    training = TrainingPass(draft)
    whole = held.measure(training, 4)
    monkeypatch.setattr(forward, "LOGITS_AT_ONCE", 5 * 4 * draft.config.draft_vocab_size)
    pieces = held.measure(training, 4)
    for t, found in whole.items():
        assert found["blocks"] == pieces[t]["blocks"] == 18
        assert found["expected_length"] == pytest.approx(pieces[t]["expected_length"], rel=1e-6)
        assert found["by_position"] == pytest.approx(pieces[t]["by_position"], abs=1e-4)


def test_a_resumed_optimiser_keeps_what_is_asked_for_now() -> None:
    def made(decay: float) -> Optimiser:
        parameters = {"fc.weight": parameter(2, 3), "norm.weight": parameter(3)}
        return Optimiser(parameters, weight_decay=decay, muon=True)

    old, new = made(0.0), made(0.1)
    new.load_state_dict(old.state_dict())
    assert [group["weight_decay"] for part in new.parts for group in part.param_groups] == [0.1, 0.1]


def test_a_step_that_was_counted_on_the_cpu_is_taken_to_a_fused_optimiser() -> None:
    """Sharded parameters, which have no fused step, keep it there."""
    old, weight = Optimiser({"w": parameter(3)}), torch.nn.Parameter(torch.ones(3, device="meta"))
    next(iter(old._parameters)).grad = torch.ones(3)
    old.step(0.1, 1.0)
    states = old.state_dict()
    states[0]["param_groups"][0]["fused"] = False
    new = Optimiser({"w": weight})
    new.load_state_dict(states)
    (adam,) = new.parts
    assert adam.param_groups[0]["fused"]
    assert adam.state[weight]["step"].device == weight.device
