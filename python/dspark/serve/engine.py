"""The engine's thread, and requests as Python sees them."""

from __future__ import annotations

import asyncio
import atexit
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from dspark import _core
from dspark.errors import DSparkError
from dspark.result import GenerationResult, Round, StreamPiece, Timing
from dspark.sampling import SamplingParams
from dspark.serve.models import Models
from dspark.text import TextStream, Tokenizer


class EngineThread:
    """Loads models and runs the Rust round loop over them until `close` or the interpreter's end.

    Loading happens on the engine's own thread so that torch's worker threads belong to it alone: OpenMP
    slows every product of a process that has more of them than cores, up to tenfold for small ones.
    """

    def __init__(self, make: Callable[[], tuple[Models, _core.Engine]]) -> None:
        loaded: Future[tuple[Models, _core.Engine]] = Future()
        self._thread = threading.Thread(target=_serve, args=(make, loaded), name="dspark-engine", daemon=True)
        self._thread.start()
        self.models, self.core = loaded.result()
        # The hook must not keep the models of a decoder alive that was dropped without `close`.
        finalizer = weakref.finalize(self, _stop, self.core, self._thread)
        finalizer.atexit = False
        self._finalizer = finalizer
        atexit.register(finalizer)

    @property
    def is_running(self) -> bool:
        """Whether requests are still served."""
        return self._finalizer.alive and self._thread.is_alive()

    def close(self) -> None:
        """Ends the loop after its current round; requests that run or wait are aborted."""
        self._finalizer()
        atexit.unregister(self._finalizer)


def _serve(
    make: Callable[[], tuple[Models, _core.Engine]], loaded: Future[tuple[Models, _core.Engine]]
) -> None:
    try:
        models, core = make()
    except BaseException as error:  # whoever waits for the models gets it
        loaded.set_exception(error)
        return
    loaded.set_result((models, core))
    del models, make, loaded
    with torch.inference_mode():
        core.run()


def _stop(core: _core.Engine, thread: threading.Thread) -> None:
    core.close()
    if thread is not threading.current_thread():
        thread.join()


@dataclass(frozen=True, slots=True)
class Submission:
    """One request, ready for the engine."""

    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    sample: int
    max_tokens: int
    end_ids: tuple[int, ...]
    tokenizer: Tokenizer | None
    speculation: str

    def start(
        self, engine: EngineThread, *, streams: bool = False, notify: Callable[[], Any] | None = None
    ) -> Handle:
        """Submits the request."""
        ticket = engine.core.submit(
            list(self.prompt),
            self.params,
            seed=self.seed,
            sample=self.sample,
            max_tokens=self.max_tokens,
            end_ids=list(self.end_ids),
            detokenizer=self._detokenizer() if self.params.stop_strings else None,
            streams=streams,
            notify=notify,
        )
        return Handle(self, ticket, engine)

    def _detokenizer(self) -> TextStream | None:
        return (
            TextStream(self.tokenizer, self.params.skip_special_tokens)
            if self.tokenizer is not None
            else None
        )

    def failed(self, error: DSparkError) -> GenerationResult:
        """The result of a request that could not be submitted."""
        return GenerationResult(
            text="",
            token_ids=(),
            prompt_token_ids=self.prompt,
            finish_reason="error",
            stop_reason=None,
            seed=self.seed,
            rounds=(),
            timing=Timing(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, None, ()),
            error=error,
            speculation=self.speculation,
        )


class Handle:
    """A submitted request: collects what arrives and makes the result of it."""

    def __init__(self, submission: Submission, ticket: _core.Ticket, engine: EngineThread) -> None:
        self._submission = submission
        # A stream outlives the decoder variable that it came from.
        self._engine = engine
        self._ticket = ticket
        self._tokens: list[int] = []
        self._text: list[str] = []
        self._logprobs: list[dict[int, float]] = []
        # With stop strings the core decides where the text ends and sends it; else it is made here.
        self._detokenizer = None if submission.params.stop_strings else submission._detokenizer()

    def cancel(self) -> None:
        """Ends the request within a round."""
        self._ticket.cancel()

    def result(self) -> GenerationResult:
        """Waits for the end. Ctrl-C cancels the request and raises."""
        try:
            piece = self._take(self._ticket.wait(whole=True))
        except BaseException:
            self.cancel()
            raise
        if piece.result is None:
            raise DSparkError("the engine gave an update without the end that it promised")
        return piece.result

    def pieces(self) -> Iterator[StreamPiece]:
        """One piece per round; the last holds the result. Closing the iterator cancels the request."""
        try:
            while True:
                piece = self._take(self._ticket.wait())
                yield piece
                if piece.result is not None:
                    return
        finally:
            self.cancel()

    async def pieces_async(self, arrived: asyncio.Event) -> AsyncIterator[StreamPiece]:
        """The same on an event loop; `arrived` is set whenever there is something to fetch."""
        try:
            while True:
                await arrived.wait()
                arrived.clear()
                update = self._ticket.poll()
                if update is None:
                    continue
                piece = self._take(update)
                yield piece
                if piece.result is not None:
                    return
        finally:
            self.cancel()

    def _take(self, update: Any) -> StreamPiece:
        tokens, text, logprobs, finish = update
        self._tokens += tokens
        self._logprobs += logprobs
        if text is None:
            text = self._decode(tokens, finish is not None)
        self._text.append(text)
        result = self._finish(finish) if finish is not None else None
        return StreamPiece(text, tuple(tokens), result)

    def _decode(self, tokens: list[int], is_last: bool) -> str:
        if self._detokenizer is None:
            return ""
        text = self._detokenizer.push(tokens) if tokens else ""
        return text + self._detokenizer.flush() if is_last else text

    def _finish(self, finish: dict[str, Any]) -> GenerationResult:
        submission = self._submission
        return GenerationResult(
            text="".join(self._text),
            token_ids=tuple(self._tokens),
            prompt_token_ids=submission.prompt,
            finish_reason=finish["reason"],
            stop_reason=finish["stop"],
            seed=submission.seed,
            rounds=tuple(Round(d, v, a, tuple(c), n) for d, v, a, c, n in finish["rounds"]),
            timing=_timing(finish),
            logprobs=tuple(self._logprobs) if submission.params.logprobs is not None else None,
            error=finish["error"],
            bad_draft_rows=finish["bad_draft_rows"],
            sample=submission.sample,
            speculation=_speculation(submission.speculation, finish),
        )


def _speculation(allowed: str, finish: dict[str, Any]) -> str:
    """What `GenerationResult.speculation` says: which rounds the policy left without a draft, and why."""
    reasons = {
        "slower": "plain decoding was estimated faster",
        "failing": "this request's drafts kept failing",
    }
    counts: dict[str, int] = finish["skipped"]
    skipped = sum(counts.values())
    if not skipped:
        return allowed
    why = ", ".join(f"{reason} ({counts[name]})" for name, reason in reasons.items() if counts[name])
    return f"{allowed}; {skipped} of {len(finish['rounds'])} rounds without a draft: {why}"


def _timing(finish: dict[str, Any]) -> Timing:
    updates: list[tuple[float, int]] = finish["updates"]
    gaps: list[float] = []
    for (before, _), (at, tokens) in pairwise(updates):
        gaps += [(at - before) / tokens] * tokens
    names = ("queue_s", "prefill_s", "draft_s", "verify_s", "sample_s", "total_s")
    return Timing(
        **{name: finish[name] for name in names},
        time_to_first_token_s=updates[0][0] if updates else None,
        gaps_s=tuple(gaps),
    )
