"""What the draft knows of each request, and taps on their way there."""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch
from torch import Tensor

from dspark.draft import DraftContext, DSparkDraftModel

WAITING_ROWS = 64
"""Rows of one request that may wait: a pass over as many costs little more than one over a single row."""


class ContextFeed:
    """Draft contexts by request id, and the taps of committed tokens that are not in them yet.

    A round without a draft leaves one row of taps per request. These wait until a draft pass or a fork needs
    the context, or until one request has more than `WAITING_ROWS` of them: then all that wait go through the
    draft's projections in one pass.
    """

    def __init__(self, draft: DSparkDraftModel | None) -> None:
        self.contexts: dict[int, DraftContext] = {}
        self._draft = draft
        self._waiting: dict[int, list[Tensor]] = {}

    def take(self, taps: Sequence[tuple[int, Tensor]], now: Container[int]) -> None:
        """Taps `[rows, taps * hidden]` of each request's newly committed tokens; those of requests in `now`
        become context at once, together with what waits of the same requests."""
        for request, rows in taps:
            # A copy where they wait: a view would keep the taps of the whole pass in memory.
            self._waiting.setdefault(request, []).append(rows if request in now else rows.clone())
        if any(sum(map(len, pieces)) > WAITING_ROWS for pieces in self._waiting.values()):
            now = tuple(self._waiting)
        self._feed(now)

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

    def _feed(self, requests: Container[int]) -> None:
        due = {request: pieces for request, pieces in self._waiting.items() if request in requests}
        if not due or self._draft is None:
            return
        for request in due:
            del self._waiting[request]
        pieces = [piece for waiting in due.values() for piece in waiting]
        grown = [(self.contexts[request], sum(map(len, waiting))) for request, waiting in due.items()]
        self._draft.extend(grown, pieces[0] if len(pieces) == 1 else torch.cat(pieces))
