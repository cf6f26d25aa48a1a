"""The draft's context of each request, and the taps that are not in it yet."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dspark.draft import DraftContext, DSparkDraftModel

_log = logging.getLogger("dspark")

WAITING_ROWS = 256
"""Rows of one request that may wait. One pass over many rows costs a fraction of many passes, and a request
that ends before it drafts costs nothing; the bound is for memory (SmolLM2: 3 MB a request)."""

FED_AT_ONCE = 2
"""Requests over the bound that one pass feeds. Those of a batch have the same age and would all be due in the
same round, which would stall every stream; so they take turns, and the last waits a few rows longer."""


@dataclass(slots=True)
class _Waiting:
    """A request's rows `start .. start + count` of the taps of each pass; others may share these tensors."""

    pieces: list[tuple[Tensor, int, int]] = field(default_factory=list)
    rows: int = 0
    failed: int = 0
    """How many rows there were when the draft last failed to take them."""
    is_shared: bool = False
    """Whether these rows keep other requests' rows in memory."""

    def first(self, rows: int) -> _Waiting:
        """The first `rows` of them, in the same tensors."""
        found = _Waiting()
        for taps, start, count in self.pieces:
            if (taken := min(count, rows - found.rows)) > 0:
                found.pieces.append((taps, start, taken))
                found.rows += taken
                found.is_shared |= taken < taps.shape[0]
        return found

    def tensors(self) -> Iterator[Tensor]:
        return (taps[start : start + count] for taps, start, count in self.pieces)


class ContextFeed:
    """Draft contexts by request id, and the taps of committed tokens that are not in them yet.

    A prompt leaves its rows of taps, a round without a draft one row per request. These wait until a draft
    pass needs the context, or until there are more than `WAITING_ROWS` of a request.

    No rows are lost if feeding them fails. In `take` that is no error: prompts and rounds go on, the rows
    keep waiting, and the next draft that needs the context tries again and gets the error.
    """

    def __init__(self, draft: DSparkDraftModel | None) -> None:
        self.contexts: dict[int, DraftContext] = {}
        self._draft = draft
        self._waiting: dict[int, _Waiting] = {}
        self._rooms: dict[int, int] = {}  # room that contexts have yet to be given

    def reserve(self, request: int, positions: int) -> None:
        """Gives a context room for that many positions and no more. A failure is no error yet: the target
        goes on, and the next draft that needs the context tries again and gets the error."""
        self._rooms[request] = positions
        try:
            self._make_room(request)
        except Exception:
            _log.exception(
                "no room for the draft's context of request %d; trying again at its next draft", request
            )

    def take(self, taps: Tensor, parts: Sequence[tuple[int, int, int]], now: Collection[int] = ()) -> None:
        """Takes the newly committed tokens' rows of a pass's taps `[rows, taps * hidden]`; `parts` has them
        as (request, first row, rows). Rows of requests in `now` become context at once, together with the
        waiting rows of these requests."""
        # If no row was rejected, every row belongs to a request and waits no longer than the bound, so the
        # pass's tensor is kept as it is. Else kept rows are copied, or rejected ones would stay in memory.
        is_shared = sum(count for *_, count in parts) == taps.shape[0]
        over: list[int] = []
        for request, start, count in parts:
            if (waiting := self._waiting.get(request)) is None:
                waiting = self._waiting[request] = _Waiting()
            own = None if is_shared or request in now else _copy([taps[start : start + count]])
            waiting.pieces.append((taps, start, count) if own is None else (own, 0, count))
            waiting.rows += count
            waiting.is_shared |= own is None and count < taps.shape[0]
            if waiting.rows - waiting.failed > WAITING_ROWS:
                over.append(request)
        # Only requests of this pass: rows that ended requests left wait for requests forked from these.
        over.sort(key=lambda request: -self._waiting[request].rows)
        due = {*now, *over[:FED_AT_ONCE]}
        try:
            self._feed(due)
        except Exception:
            _log.exception("the draft's context could not be fed; the rows wait for the next draft")
            for request in due:
                if (waiting := self._waiting.get(request)) is not None:
                    waiting.failed = waiting.rows

    def let_go(self, running: Collection[int]) -> None:
        """Copies the waiting rows of ended requests (those not in `running`) out of tensors that they share
        with others: a kept prefix may wait long for its fork."""
        for request, waiting in self._waiting.items():
            if request in running or not waiting.is_shared:
                continue
            if (own := _copy(list(waiting.tensors()))) is not None:
                waiting.pieces, waiting.is_shared = [(own, 0, waiting.rows)], False

    def complete(self, requests: Sequence[int]) -> list[DraftContext]:
        """The contexts of these requests, with every committed token in them."""
        self._feed(requests)
        for request in requests:
            self._make_room(request)
        return [self.contexts[request] for request in requests]

    def fork(self, new: int, source: int, length: int, room: int) -> None:
        """Gives `new` a copy of the first `length` positions of `source`'s context, and reserves `room`.
        Waiting rows of these positions keep waiting, for both."""
        if self._draft is None:
            return
        context, waiting = self.contexts[source], self._waiting.get(source)
        fed = min(length, context.length)
        forked = context.fork(fed, room) if fed else None
        if forked is None:
            forked = self._draft.new_context()
            if room:
                forked.reserve(room)
        if fed < length and waiting is not None:
            self._waiting[new] = waiting.first(length - fed)
        self.contexts[new] = forked

    def release(self, request: int) -> None:
        """Forgets a request."""
        self.contexts.pop(request, None)
        self._waiting.pop(request, None)
        self._rooms.pop(request, None)

    def _make_room(self, request: int) -> None:
        if (positions := self._rooms.get(request)) is not None:
            self.contexts[request].reserve(positions)
            del self._rooms[request]

    def _feed(self, requests: Collection[int]) -> None:
        due = [request for request in self._waiting if request in requests]
        if not due or self._draft is None:
            return
        for request in due:
            self._make_room(request)
        waited = [self._waiting[request] for request in due]
        pieces = [piece for waiting in waited for piece in waiting.tensors()]
        grown = [(self.contexts[request], waiting.rows) for request, waiting in zip(due, waited, strict=True)]
        self._draft.extend(grown, pieces[0] if len(pieces) == 1 else torch.cat(pieces))
        for request in due:  # only now: a pass that fails must leave no hole
            del self._waiting[request]


def _copy(pieces: Sequence[Tensor]) -> Tensor | None:
    """A copy of all these rows; `None` if there is no memory for it, which is no reason to end a request."""
    try:
        return torch.cat(list(pieces))
    except Exception:
        _log.exception("waiting rows cannot be copied, so they keep those of other requests in memory")
        return None
