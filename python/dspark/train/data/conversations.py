"""Conversations as token ids, with the spans that the target wrote."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dspark.text.looping import is_looping

Tokens = NDArray[np.int64]

NO_FAILURES: Tokens = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Conversation:
    """One sequence to train on.

    Attributes:
        tokens: `[length]`, everything from the first token of the prompt on.
        answers: (start, stop) of each span that the target wrote, end token included, ascending.
        failed: positions of the tokens with which the target replaced a drafted one, if it was generated
            with a draft.
        dialogue: for a later turn of a dialogue, the `prompt_number` of its first turn; None: this is the
            first turn, or no earlier one is known.
    """

    tokens: Tokens
    answers: tuple[tuple[int, int], ...]
    failed: Tokens = field(default_factory=lambda: NO_FAILURES)
    dialogue: int | None = None

    @property
    def answer_tokens(self) -> int:
        """Number of tokens that the target wrote."""
        return sum(stop - start for start, stop in self.answers)

    def cut(self, length: int) -> Conversation:
        """The first `length` tokens."""
        if len(self.tokens) <= length:
            return self
        answers = tuple((start, min(stop, length)) for start, stop in self.answers if start < length)
        return Conversation(self.tokens[:length], answers, self.failed[self.failed < length], self.dialogue)

    def mask(self) -> NDArray[np.bool_]:
        """`[length]`: whether the target wrote the token."""
        found = np.zeros(len(self.tokens), np.bool_)
        for start, stop in self.answers:
            found[start:stop] = True
        return found

    def key(self) -> str:
        """A key that is the same for equal tokens with equal answers, across runs and machines. The states
        computed for the tokens depend on where answers start: normalisers are computed from there on."""
        spans = np.array([len(self.tokens), *(at for span in self.answers for at in span)])
        return _digest(np.concatenate((self.tokens, spans))).hex()

    def prompt_number(self) -> int:
        """A 64-bit hash of the dialogue's first prompt: of what came before its first answer."""
        if self.dialogue is not None:
            return self.dialogue
        return int.from_bytes(_digest(self.tokens[: self.answers[0][0]])[:8], "big")

    def is_held_out(self, share: float) -> bool:
        """Whether it belongs to the held-out share. The dialogue's first prompt alone decides, so that all of
        its answers and turns are on one side, whatever else is in the data and whenever they were added."""
        return self.prompt_number() < share * 2.0**64


def _digest(tokens: Tokens) -> bytes:
    return hashlib.blake2b(tokens.astype("<u4").tobytes(), digest_size=16).digest()


def fingerprint(keys: Iterable[str]) -> str:
    """A hash of conversations, from their keys in order."""
    return hashlib.blake2b("".join(keys).encode(), digest_size=8).hexdigest()


@dataclass(slots=True)
class Sieve:
    """Lets conversations through that are worth training on, and counts the others."""

    max_length: int
    looping: int = 0
    duplicate: int = 0
    too_short: int = 0
    _seen: set[str] = field(default_factory=set)

    def __call__(self, conversations: Iterable[Conversation]) -> Iterator[Conversation]:
        """The conversations cut to `max_length`, without duplicates, those with an answer that loops
        (`dspark.text.looping`), and those without two answer tokens in a row."""
        for whole in conversations:
            one = whole.cut(self.max_length)
            if not any(stop - start >= 2 for start, stop in one.answers):
                self.too_short += 1
            elif any(is_looping(one.tokens[a:b].tolist()) for a, b in one.answers):
                self.looping += 1
            elif (key := one.key()) in self._seen:
                self.duplicate += 1
            else:
                self._seen.add(key)
                yield one


def split(
    conversations: Iterable[Conversation], share: float
) -> tuple[list[Conversation], list[Conversation]]:
    """(to train on, held out), the latter about `share` of the prompts."""
    trained: list[Conversation] = []
    held_out: list[Conversation] = []
    for one in conversations:
        (held_out if one.is_held_out(share) else trained).append(one)
    return trained, held_out


def evaluated(held_out: Iterable[Conversation], count: int) -> list[Conversation]:
    """The `count` held-out conversations to evaluate on, chosen by their keys, so that every source gives its
    share, wherever it is in the data."""
    return sorted(held_out, key=Conversation.key)[:count]


def frequent_tokens(conversations: Iterable[Conversation], vocab_size: int, size: int) -> Tokens:
    """The `size` tokens that the target's own answers use most, ascending: a reduced draft vocabulary.

    Ties, and tokens never used, go by ascending id.
    """
    counts = np.zeros(vocab_size, np.int64)
    for one in conversations:
        for start, stop in one.answers:
            np.add.at(counts, one.tokens[start:stop], 1)
    return np.sort(np.argsort(-counts, kind="stable")[:size])
