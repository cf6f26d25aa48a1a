"""Streams: a request's pieces as they come, for threads and for event loops.

These are iterator classes, not generators: a generator that was never started runs no `finally` when it is
closed, and an asynchronous one is finalised by its event loop, which may be closed by then. These cancel
their request when they are closed and, because the ticket that they hold does so, when they are dropped.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from functools import partial

from dspark.result import StreamPiece
from dspark.serve.engine import EngineThread
from dspark.serve.request import Submission


class PieceStream(Iterator[StreamPiece]):
    """One piece per round; the last one has the result. Closing or dropping the stream cancels the request.

    Raises the error that made the request fail. Any thread may close it; if several read, each piece goes to
    one of them.
    """

    def __init__(self, engine: EngineThread, submission: Submission) -> None:
        """Submits the request; raises what `Submission.start` raises."""
        self._handle = submission.start(engine, streams=True)
        self._reading = threading.Lock()
        self._over = False

    def __next__(self) -> StreamPiece:
        with self._reading:
            if self._over:
                raise StopIteration
            try:
                piece = self._handle.wait()
            except BaseException:  # Ctrl-C
                self.close()
                raise
            if piece.result is not None:
                self._over = True
        return _checked(piece)

    def close(self) -> None:
        """Ends the stream at once and the request within a round; a thread that waits gets the last piece."""
        self._over = True
        self._handle.cancel()


class AsyncPieceStream(AsyncIterator[StreamPiece]):
    """`PieceStream` for asyncio, on the event loop that it was made on.

    A task that is cancelled while it waits for a piece cancels the request too, and so does closing the loop.
    """

    def __init__(self, engine: EngineThread, submission: Submission) -> None:
        """Submits the request; raises what `Submission.start` does, and `RuntimeError` outside of a loop."""
        # Set whenever there is something to fetch.
        self._arrived = asyncio.Event()
        notify = partial(asyncio.get_running_loop().call_soon_threadsafe, self._arrived.set)
        self._handle = submission.start(engine, streams=True, notify=notify)
        self._reading = asyncio.Lock()
        self._over = False

    async def __anext__(self) -> StreamPiece:
        async with self._reading:
            if self._over:
                raise StopAsyncIteration
            try:
                piece = await self._next()
            except BaseException:  # the task was cancelled
                await self.aclose()
                raise
            if piece.result is not None:
                self._over = True
        return _checked(piece)

    async def aclose(self) -> None:
        """Ends the stream at once and the request within a round; a task that waits gets the last piece."""
        self._over = True
        self._handle.cancel()

    async def _next(self) -> StreamPiece:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            piece = self._handle.poll()
            if piece is not None:
                return piece


def _checked(piece: StreamPiece) -> StreamPiece:
    if piece.result is not None and piece.result.error is not None:
        raise piece.result.error
    return piece
