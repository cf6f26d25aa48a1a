"""Requests of one call, run together."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from queue import SimpleQueue

from dspark.errors import DSparkError, QueueFullError
from dspark.result import GenerationResult
from dspark.serve.engine import EngineThread
from dspark.serve.request import Handle, Submission


def run_together(
    engine: EngineThread, jobs: Iterable[Submission | GenerationResult], *, raises: bool = False
) -> list[GenerationResult]:
    """The results of `jobs` in their order; a job that is a result already is returned as it is.

    Jobs that the engine's queue has no room for wait here until one of this call's own requests has ended. If
    none of these is left to wait for, the job fails with `QueueFullError`: the queue is full of others'
    requests, and nothing says when they end. A failure to submit becomes a result; with `raises` it cancels
    the call and is raised. Interrupting the call cancels its requests.
    """
    ended: SimpleQueue[None] = SimpleQueue()
    running = 0

    def start(job: Submission) -> Handle:
        nonlocal running
        while True:
            try:
                handle = job.start(engine, notify=partial(ended.put, None))
            except QueueFullError:
                if running == 0:
                    raise
                ended.get()
                running -= 1
            else:
                running += 1
                return handle

    outcomes: list[Handle | GenerationResult] = []
    try:
        for job in jobs:
            if isinstance(job, GenerationResult):
                outcomes.append(job)
                continue
            try:
                outcomes.append(start(job))
            except DSparkError as error:
                if raises:
                    raise
                outcomes.append(job.failed(error))
        return [outcome.result() if isinstance(outcome, Handle) else outcome for outcome in outcomes]
    except BaseException:
        for outcome in outcomes:
            if isinstance(outcome, Handle):
                outcome.cancel()
        raise
