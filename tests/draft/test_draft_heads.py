"""The Markov heads by step, by block and by formula, and the confidence head."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dspark.draft import AcceptRatePredictor, GatedMarkovHead, RNNHead, VanillaMarkov
from dspark.errors import ConfigError
from model_zoo import HIDDEN, VOCAB

EXACT = 1e-10


def head_case(kind: str) -> tuple[VanillaMarkov, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    heads = {
        "vanilla": lambda: VanillaMarkov(VOCAB, 5),
        "gated": lambda: GatedMarkovHead(VOCAB, 5, HIDDEN),
        "rnn": lambda: RNNHead(VOCAB, 5, HIDDEN),
    }
    head = heads[kind]().double()
    base = torch.randn(2, 3, 6, VOCAB, dtype=torch.float64)
    return head, base, torch.randint(0, VOCAB, (2, 3, 6)), torch.randn(2, 3, 6, HIDDEN, dtype=torch.float64)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_markov_heads_by_step_by_block_and_by_formula(kind: str) -> None:
    head, base, previous, hidden = head_case(kind)
    block = head.block(base, previous, hidden)
    state, steps = None, []
    for slot in range(6):
        bias, state = head.step(previous[..., slot], hidden[..., slot, :], state)
        steps.append(base[..., slot, :] + bias)
    assert (torch.stack(steps, -2) - block).abs().max() < EXACT
    w1, w2 = head.markov_w1.weight, head.markov_w2.weight
    s = torch.zeros(2, 3, 5, dtype=torch.float64)
    for slot in range(6):
        e, h = w1[previous[..., slot]], hidden[..., slot, :]
        latent = e
        if isinstance(head, GatedMarkovHead):
            g = torch.sigmoid(torch.cat((h, e), -1) @ head.gate_proj.weight.T + head.gate_proj.bias)
            latent = g * e
        if isinstance(head, RNNHead):
            z = torch.cat((s, e, h), -1) @ head.joint_proj.weight.T + head.joint_proj.bias
            gate = torch.sigmoid(z[..., :5])
            s = gate * s + (1 - gate) * torch.tanh(z[..., 5:10])
            latent = torch.tanh(z[..., 10:])
        assert (base[..., slot, :] + latent @ w2.T - block[..., slot, :]).abs().max() < EXACT
    block.sum().backward()
    assert all(parameter.grad is not None for parameter in head.parameters())


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_heads_that_read_hidden_states_ask_for_them(kind: str) -> None:
    head, base, previous, _ = head_case(kind)
    with pytest.raises(ConfigError, match="hidden states"):
        head.block(base, previous)


@pytest.mark.parametrize("rank", [0, 5])
def test_the_confidence_head_with_and_without_the_markov_feature(rank: int) -> None:
    markov, _, previous, hidden = head_case("vanilla")
    head = AcceptRatePredictor(HIDDEN, rank).double()
    features = torch.cat((hidden, markov.markov_w1.weight[previous]), -1) if rank else hidden
    expected = features @ head.proj.weight[0] + head.proj.bias
    found = head(hidden, previous, markov) if rank else head(hidden)
    assert found.shape == (2, 3, 6)
    assert (found - expected).abs().max() < EXACT
    if rank:
        with pytest.raises(ConfigError, match="Markov feature"):
            head(hidden)


def test_a_markov_head_needs_a_rank() -> None:
    with pytest.raises(ConfigError, match="rank of at least 1, found 0"):
        VanillaMarkov(VOCAB, 0)
