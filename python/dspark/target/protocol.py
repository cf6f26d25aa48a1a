"""What the engine, the draft and the audit ask of a target, whatever its architecture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from dspark.kernels import Choice

OURS = "dspark"
"""The value of `runs_through` of our own models."""


class TargetSizes(Protocol):
    """The part of a target's configuration that others read. Sizes in elements, positions in tokens."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def tie_word_embeddings(self) -> bool: ...


class TargetCache(Protocol):
    """What a target remembers of one request."""

    @property
    def length(self) -> int:
        """Committed tokens."""

    @property
    def position_bytes(self) -> int:
        """Bytes of memory for each further position; 0 where that is not known beforehand."""

    @property
    def state_bytes(self) -> int:
        """Bytes of recurrent states, whatever the length; a mark takes as many again."""

    def advance(self, count: int) -> None:
        """Keeps the first `count` rows (0 up to all) of the last pass and forgets the others.

        Afterwards the cache equals, up to rounding, one that saw only the kept tokens. A pass that is not
        followed by this call leaves no trace either: the next pass starts from the committed tokens again.
        """

    def reserve(self, positions: int) -> None:
        """Makes room for `positions` positions and no more, the rows of a pass included.

        From then on a pass that needs more raises `CapacityError`. Without this call a cache grows as
        needed.
        """

    def mark(self) -> None:
        """Marks the end of the committed tokens as a place to fork at, replacing the previous mark. Only
        caches of targets with `forks_at_parts` need it."""

    def fork(self, length: int, room: int = 0) -> Self | None:
        """A new cache that holds the first `length` committed tokens, or as many of them as possible.

        The two share no memory: nothing that happens to one is seen in the other. Rows that were not
        committed are not copied.

        Args:
            room: positions to reserve for the new cache; 0 reserves nothing.

        Returns:
            The cache, whose `length` says how many tokens it took, or None if it can take none.
        """


@runtime_checkable
class Target(Protocol):
    """A causal language model over packed ragged rows, which can be tapped."""

    @property
    def config(self) -> TargetSizes: ...

    @property
    def device(self) -> torch.device:
        """Where the weights are."""

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype, and that of logits and taps."""

    @property
    def embedding_weight(self) -> Tensor:
        """`[vocabulary, hidden]`, as stored."""

    @property
    def forks_at_parts(self) -> bool:
        """Whether a cache can only be forked at its present length or at its mark (recurrent states)."""

    @property
    def runs_through(self) -> str:
        """Whose code computes the passes: `OURS`, or a library, described in words."""

    @property
    def unforkable(self) -> str | None:
        """Why copies of its caches are inexact, so that prefixes cannot be reused; None if they are exact."""

    @property
    def refuses_to_lend(self) -> Mapping[str, str]:
        """What a draft cannot take from this target ("embeddings", "output head"), and why."""

    def use_kernels(self, choice: Choice) -> dict[str, str]:
        """Lets passes use CUDA kernels from now on; returns what computes each role."""

    def new_cache(self) -> Any:
        """An empty `TargetCache` for one request; only the target that made it looks inside."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings `[rows, hidden]` of token ids `[rows]`."""

    def project(self, hidden: Tensor) -> Tensor:
        """Logits `[rows, vocabulary]` of normed hidden states `[rows, hidden]`."""

    def __call__(
        self,
        token_ids: Tensor,
        segments: Sequence[tuple[Any, int]],
        taps: Sequence[int] = (),
        logits: str = "all",
    ) -> tuple[Tensor, Tensor | None]:
        """One pass over the rows of several requests, one after the other.

        Segment i owns the next n rows, at positions length .. length + n - 1 of its cache; `cache.advance`
        commits.

        Args:
            token_ids: `[rows]`, int64.
            segments: (cache, n > 0) of each request; the n add up to rows.
            taps: layers whose outputs are wanted; -1 is the embeddings.
            logits: "all" rows, or the "last" row of each segment; "hidden" gives all rows' normed hidden
                states `[rows, hidden]` instead, which `project` turns into logits.

        Returns:
            Logits `[rows or segments, vocabulary]`, and the taps side by side, `[rows, taps * hidden]` (None
            without taps).
        """


class OwnTarget:
    """The members that all targets with passes of our own share."""

    forks_at_parts = False
    runs_through = OURS
    unforkable: str | None = None
    refuses_to_lend: Mapping[str, str] = MappingProxyType({})

    @property
    def embedding_weight(self) -> Tensor:
        """`[vocabulary, hidden]`, as stored; each model overrides this."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding_weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype, and that of logits and taps."""
        return self.embedding_weight.dtype
