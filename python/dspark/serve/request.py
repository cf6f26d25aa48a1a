"""A request as Python sees it: what is submitted, and the handle that its client holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from dspark import _core
from dspark.errors import DSparkError
from dspark.result import GenerationResult, Round, StreamPiece, Timing
from dspark.sampling import SamplingParams
from dspark.serve.engine import EngineThread
from dspark.text import TextStream, Tokenizer


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
    called: float
    """When its call began, by `time.monotonic`: its timeout and its times count from then."""

    def start(
        self,
        engine: EngineThread,
        *,
        streams: bool = False,
        notify: Callable[[], Any] | None = None,
    ) -> Handle:
        """Submits the request.

        `notify` is called on the engine's thread when there is something to fetch; without `streams`, only at
        the end. Raises `QueueFullError`, or `CapacityError` for a request that can never run.
        """
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
            waited=time.monotonic() - self.called,
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
            sample=self.sample,
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
        # With stop strings the core decides where the text ends and sends it; else it is decoded here.
        self._detokenizer = None if submission.params.stop_strings else submission._detokenizer()

    def cancel(self) -> None:
        """Ends the request within a round."""
        self._ticket.cancel()

    def result(self) -> GenerationResult:
        """Waits for the end. Ctrl-C cancels the request and raises."""
        self._engine.check_process()
        try:
            piece = self._take(self._ticket.wait(whole=True))
        except BaseException:
            self.cancel()
            raise
        if piece.result is None:
            raise DSparkError("the engine reported the end of the request, but gave no result")
        return piece.result

    def wait(self) -> StreamPiece:
        """Waits for the tokens of the next round."""
        self._engine.check_process()
        return self._take(self._ticket.wait())

    def poll(self) -> StreamPiece | None:
        """What has arrived since the last fetch; `None` if nothing has."""
        update = self._ticket.poll()
        return None if update is None else self._take(update)

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
            reused_tokens=finish["reused"],
            preemptions=finish["preemptions"],
        )


def _speculation(allowed: str, finish: dict[str, Any]) -> str:
    """What `GenerationResult.speculation` says: which rounds went without a draft, and why."""
    reasons = {
        "slower": "plain decoding was estimated faster",
        "failing": "this request's drafts kept failing",
        "broken": "the draft failed",
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
