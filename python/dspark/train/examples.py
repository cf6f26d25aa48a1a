"""From conversations to batches: an endless, repeatable order, and padding."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dspark.train.batch import Batch
from dspark.train.data.conversations import Conversation
from dspark.train.teacher import States


class StateSource(Protocol):
    """Where the teacher's states come from: the target itself, or a cache."""

    def states(self, conversations: Sequence[Conversation]) -> list[States]: ...


class Order:
    """An endless sequence of indices below `size`: one shuffled epoch after the other. Item i depends on
    (seed, i) alone, so a position in the sequence is a single number."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed = size, seed
        self._epoch: tuple[int, NDArray[np.int64]] | None = None

    def __getitem__(self, item: int) -> int:
        epoch, position = divmod(item, self.size)
        if self._epoch is None or self._epoch[0] != epoch:
            order = np.random.default_rng((self.seed, epoch)).permutation(self.size)
            self._epoch = epoch, order.astype(np.int64)
        return int(self._epoch[1][position])


def seeded(*numbers: int) -> torch.Generator:
    """A generator that depends on the numbers alone."""
    seed = np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(seed) & (2**63 - 1))


def framed(conversations: Sequence[Conversation]) -> tuple[Tensor, Tensor]:
    """Token ids and answers `[B, S]` of conversations, padded on the right to the longest."""
    longest = max(len(one.tokens) for one in conversations)
    ids = torch.zeros(len(conversations), longest, dtype=torch.int64)
    answers = torch.zeros(len(conversations), longest, dtype=torch.bool)
    for row, one in enumerate(conversations):
        ids[row, : len(one.tokens)] = torch.from_numpy(one.tokens)
        answers[row, : len(one.tokens)] = torch.from_numpy(one.mask())
    return ids, answers


def collate(conversations: Sequence[Conversation], states: Sequence[States], device: torch.device) -> Batch:
    """Conversations and their states, padded on the right to the longest."""
    ids, answers = framed(conversations)
    first, longest = states[0], ids.shape[1]
    taps = first.taps.new_zeros(len(states), longest, first.taps.shape[1])
    hidden = first.hidden.new_zeros(len(states), longest, first.hidden.shape[1])
    normalisers = first.normalisers.new_zeros(len(states), longest)
    for row, (one, of) in enumerate(zip(conversations, states, strict=True)):
        length = len(one.tokens)
        taps[row, :length], hidden[row, :length] = of.taps, of.hidden
        normalisers[row, :length] = of.normalisers
    return Batch(ids, answers, taps, hidden, normalisers).to(device)


def noisy(batch: Batch, size: float, generators: Sequence[torch.Generator]) -> Batch:
    """The batch with uniform noise in [-size / 2, size / 2] on its taps (as in speculators, 0.05 by default
    there): the taps in decoding are computed with other matrix shapes than those in training."""
    if size == 0.0:
        return batch
    shape = batch.taps.shape[1:]
    noise = torch.stack([torch.rand(shape, generator=generator) - 0.5 for generator in generators])
    return dataclasses.replace(batch, taps=batch.taps + (noise * size).to(batch.taps))
