"""Clients that are never without a request: as many run in a measurement's last round as in its first."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue

from dspark.decoder import DSparkDecoder
from dspark.result import GenerationResult
from dspark.sampling import SamplingParams
from dspark.serve.request import Handle

POLL = 0.005
"""Seconds between two looks at the engine's statistics."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What an engine has done so far, without prefills and the tokens drawn from them."""

    tokens: int
    """Committed by rounds."""
    seconds: float
    """Of rounds."""

    @classmethod
    def of(cls, decoder: DSparkDecoder) -> Usage:
        """As of now."""
        stats = decoder.stats()
        return cls(stats["rounds"] + stats["accepted"], stats["round_s"] - stats["prefill_s"])


def keep_busy(
    decoder: DSparkDecoder,
    requests: Iterator[tuple[Sequence[int], SamplingParams]],
    clients: int,
    tokens: int,
) -> list[GenerationResult]:
    """Lets `clients` clients ask one request after another until rounds have committed `tokens` tokens; what
    runs then is cancelled. Returns the results in the order of the requests, or raises the first error.

    A batch that runs to its end would measure something else: plain decoding ends all of it in one round,
    while with a draft the last requests run alone for a while.
    """
    ended: SimpleQueue[None] = SimpleQueue()
    handles: list[Handle] = []

    def ask() -> None:
        submission = decoder._submission(*next(requests), time.monotonic())
        handles.append(submission.start(decoder._engine, notify=partial(ended.put, None)))

    until = Usage.of(decoder).tokens + tokens
    try:
        for _ in range(clients):
            ask()
        while Usage.of(decoder).tokens < until:
            try:
                ended.get(timeout=POLL)
            except Empty:
                continue
            ask()
    finally:
        for handle in handles:
            handle.cancel()
    results = [handle.result() for handle in handles]
    for result in results:
        if result.error is not None:
            raise result.error
    return results
