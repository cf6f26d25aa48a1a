"""What the draft knows of each request, and taps on their way there."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.draft import DraftContext, DSparkDraftModel

WAITING_ROWS = 256
"""Rows of one request that may wait. Many rows in one pass cost a fraction of as many passes, and a request
that ends before it drafts costs nothing; the bound is for memory (SmolLM2: 3 MB a request)."""


@dataclass(slots=True)
class _Waiting:
    pieces: list[Tensor]
    rows: int = 0


class ContextFeed:
    """Draft contexts by request id, and the taps of committed tokens that are not in them yet.

    A prompt leaves its rows of taps, a round without a draft one row per request. These wait until a draft
    pass or a fork needs the context, or until one request has more than `WAITING_ROWS` of them: then those
    of the whole batch go through the draft's projections in one pass.
    """

    def __init__(self, draft: DSparkDraftModel | None) -> None:
        self.contexts: dict[int, DraftContext] = {}
        self._draft = draft
        self._waiting: dict[int, _Waiting] = {}

    def take(self, taps: Sequence[tuple[int, Tensor]], now: Collection[int] = ()) -> None:
        """Taps `[rows, taps * hidden]` of each request's newly committed tokens; those of requests in `now`
        become context at once, together with what waits of the same requests."""
        full = False
        for request, rows in taps:
            waiting = self._waiting.setdefault(request, _Waiting([]))
            # A copy where they wait: a view would keep the taps of the whole pass in memory.
            is_whole = rows.untyped_storage().nbytes() == rows.nbytes
            waiting.pieces.append(rows if request in now or is_whole else rows.clone())
            waiting.rows += rows.shape[0]
            full |= waiting.rows > WAITING_ROWS
        # Of this pass alone: what ended requests left waits for the fork that needs it.
        self._feed([request for request, _ in taps] if full else now)

    def complete(self, requests: Sequence[int]) -> list[DraftContext]:
        """The contexts of these requests, with every committed token in them."""
        self._feed(requests)
        return [self.contexts[request] for request in requests]

    def fork(self, new: int, source: int, length: int, room: int) -> None:
        """Gives `new` a copy of the first `length` positions of `source`'s context, and reserves `room`."""
        (context,) = self.complete([source])
        if (forked := context.fork(length, room)) is not None:
            self.contexts[new] = forked

    def release(self, request: int) -> None:
        """Forgets a request."""
        self.contexts.pop(request, None)
        self._waiting.pop(request, None)

    def _feed(self, requests: Collection[int]) -> None:
        due = [request for request in self._waiting if request in requests]
        if not due or self._draft is None:
            return
        waited = [self._waiting[request] for request in due]
        pieces = [piece for waiting in waited for piece in waiting.pieces]
        grown = [(self.contexts[request], waiting.rows) for request, waiting in zip(due, waited, strict=True)]
        self._draft.extend(grown, pieces[0] if len(pieces) == 1 else torch.cat(pieces))
        for request in due:  # not before: a pass that fails must leave no hole
            del self._waiting[request]
