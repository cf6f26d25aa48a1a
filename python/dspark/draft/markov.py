"""The Markov heads: what the token just drafted adds to the next slot's logits (paper, section 3.2).

Each adds bias = W2 f(W1[x], ...) to the base logits, with low-rank W1, W2. These are the torch modules, for
training and as the reference of the core's chain: `step` advances by one token, `block` computes a whole
block with teacher forcing.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dspark.errors import ConfigError


class VanillaMarkov(nn.Module):
    """bias = W2 W1[x]: a bigram table of low rank."""

    kind = "vanilla"
    needs_hidden = False

    def __init__(self, vocab_size: int, markov_rank: int, draft_vocab_size: int | None = None) -> None:
        """`vocab_size` tokens can come before a slot; `draft_vocab_size` (None: as many) can be drafted."""
        super().__init__()
        if markov_rank < 1:
            raise ConfigError(f"a Markov head needs a rank of at least 1, found {markov_rank}")
        self.markov_rank = markov_rank
        self.markov_w1 = nn.Embedding(vocab_size, markov_rank)
        self.markov_w2 = nn.Linear(markov_rank, draft_vocab_size or vocab_size, bias=False)

    def features(self, previous: Tensor) -> Tensor:
        """W1[x], `[..., rank]`, of token ids `[...]`; the confidence head reads it too."""
        return self.markov_w1(previous)  # type: ignore[no-any-return]

    def step(
        self, previous: Tensor, hidden: Tensor | None = None, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Bias `[..., draft vocabulary]` after tokens `previous` `[...]`, and the next state.

        `hidden` `[..., hidden]` is the backbone's output at the slot; heads that do not read it ignore it.
        `state` is the one returned for the slot before, None for the first slot.
        """
        return self.markov_w2(self.features(previous)), None

    def block(self, base_logits: Tensor, previous: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Logits with the bias, teacher-forced.

        Args:
            base_logits: `[..., slots, draft vocabulary]`. previous: `[..., slots]`, the token before each
                slot.
            hidden: `[..., slots, hidden]`.
        """
        bias, _ = self.step(previous, hidden)
        return base_logits + bias


class GatedMarkovHead(VanillaMarkov):
    """bias = W2 (sigmoid(G [h; W1[x]] + b) * W1[x])."""

    kind = "gated"
    needs_hidden = True

    def __init__(
        self, vocab_size: int, markov_rank: int, hidden_size: int, draft_vocab_size: int | None = None
    ) -> None:
        super().__init__(vocab_size, markov_rank, draft_vocab_size)
        self.gate_proj = nn.Linear(hidden_size + markov_rank, markov_rank)

    def step(
        self, previous: Tensor, hidden: Tensor | None = None, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        features = self.features(previous)
        gate = torch.sigmoid(self.gate_proj(torch.cat((_needed(hidden), features), dim=-1)))
        return self.markov_w2(gate * features), None


class RNNHead(VanillaMarkov):
    """A gated recurrence over the block, so that a slot sees every token drafted before it.

    [g; c; o] = J [s; W1[x]; h] + b, s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c), bias = W2 tanh(o), s_0 = 0.
    """

    kind = "rnn"
    needs_hidden = True

    def __init__(
        self, vocab_size: int, markov_rank: int, hidden_size: int, draft_vocab_size: int | None = None
    ) -> None:
        super().__init__(vocab_size, markov_rank, draft_vocab_size)
        self.joint_proj = nn.Linear(2 * markov_rank + hidden_size, 3 * markov_rank)

    def step(
        self, previous: Tensor, hidden: Tensor | None = None, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        features = self.features(previous)
        if state is None:
            state = torch.zeros_like(features)
        joint = self.joint_proj(torch.cat((state, features, _needed(hidden)), dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        state = gate * state + (1.0 - gate) * torch.tanh(candidate)
        return self.markov_w2(torch.tanh(output)), state

    def block(self, base_logits: Tensor, previous: Tensor, hidden: Tensor | None = None) -> Tensor:
        hidden = _needed(hidden)
        state: Tensor | None = None
        slots = []
        for slot in range(base_logits.shape[-2]):
            bias, state = self.step(previous[..., slot], hidden[..., slot, :], state)
            slots.append(base_logits[..., slot, :] + bias)
        return torch.stack(slots, dim=-2)


def build_markov_head(
    kind: str | None, vocab_size: int, rank: int, hidden_size: int, draft_vocab_size: int | None = None
) -> VanillaMarkov | None:
    """The head of a configuration: None, "vanilla", "gated" or "rnn"."""
    if kind is None:
        return None
    if kind == "vanilla":
        return VanillaMarkov(vocab_size, rank, draft_vocab_size)
    if kind == "gated":
        return GatedMarkovHead(vocab_size, rank, hidden_size, draft_vocab_size)
    if kind == "rnn":
        return RNNHead(vocab_size, rank, hidden_size, draft_vocab_size)
    raise ConfigError(f"unknown Markov head {kind!r}; known are vanilla, gated and rnn")


def _needed(hidden: Tensor | None) -> Tensor:
    if hidden is None:
        raise ConfigError("this Markov head reads the backbone's hidden states, but none were given")
    return hidden
