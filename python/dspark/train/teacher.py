"""The frozen target as a teacher: tapped states, last states, and the normalisers of its logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.errors import ConfigError, NumericsError
from dspark.target.protocol import Target
from dspark.train.data.conversations import Conversation

ROWS_AT_ONCE = 128
"""Rows of logits over the whole vocabulary in memory at a time."""

AT_ONCE = 4
"""Conversations in one pass, where the states are kept."""


@dataclass(frozen=True, slots=True)
class States:
    """The states of a conversation of L tokens: `taps` `[L, taps * hidden]`, `hidden` `[L, hidden]` after the
    final norm, `normalisers` `[L]` f32 (0 before the row that predicts the first answer token)."""

    taps: Tensor
    hidden: Tensor
    normalisers: Tensor


class Teacher:
    """Runs conversations through the target, whole and from their beginning, as prefill does."""

    def __init__(self, target: Target, taps: Sequence[int], head: Tensor | None = None) -> None:
        """`head` `[vocabulary, hidden]`, f32: given for a target in 16 bits, whose own logits are too coarse
        (in bfloat16, those around 20 are off by 0.06)."""
        self.target = target
        self.taps = tuple(taps)
        self._head = head

    def logits(self, hidden: Tensor) -> Tensor:
        """The target's logits `[rows, vocabulary]`, f32 or wider, of normed hidden states."""
        if self._head is not None:
            return hidden.float() @ self._head.T
        logits = self.target.project(hidden.to(self.target.dtype))
        return logits if logits.dtype == torch.float64 else logits.float()

    def states(self, conversations: Sequence[Conversation]) -> list[States]:
        """The states of these conversations, from one pass over all of them.

        Raises:
            NumericsError: the target gave a NaN or an infinity.
        """
        lengths = [len(one.tokens) for one in conversations]
        with torch.inference_mode():
            ids = torch.cat([torch.from_numpy(one.tokens) for one in conversations]).to(self.target.device)
            segments = [(self.target.new_cache(), length) for length in lengths]
            hidden, taps = self.target(ids, segments, self.taps, "hidden")
            if taps is None:
                raise ConfigError("a draft reads at least one tap")
            found = []
            parts = zip(conversations, torch.split(hidden, lengths), torch.split(taps, lengths), strict=True)
            for one, last, tapped in parts:
                normalisers = torch.zeros(len(last), dtype=torch.float32, device=last.device)
                first = one.answers[0][0] - 1  # the row that predicts the first answer token
                for start in range(max(first, 0), len(last), ROWS_AT_ONCE):
                    rows = slice(start, start + ROWS_AT_ONCE)
                    normalisers[rows] = self.logits(last[rows]).logsumexp(-1)
                if not (normalisers.isfinite().all() and tapped.isfinite().all()):
                    raise NumericsError(f"the target gave a NaN or an infinity on conversation {one.key()}")
                found.append((tapped, last, normalisers))
        # Copies outside of inference mode: what autograd saves must be ordinary tensors.
        return [States(*(tensor.clone() for tensor in tensors)) for tensors in found]
