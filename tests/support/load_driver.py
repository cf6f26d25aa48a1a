"""A random load on one decoder: jobs of every kind from threads and tasks, checked against each alone.

`draw_jobs` draws what clients want, `run_jobs` lets them have it and leave when they please, `check`
compares. A seed draws the same jobs again; their interleaving is the machine's own.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from dspark import CapacityError, DSparkDecoder, QueueFullError, RequestError, SamplingParams

WAYS = ("whole", "list", "stream", "stream", "astream", "astream")


@dataclass
class Job:
    """What one client wants, and what it got."""

    prompt: list[int]
    params: SamplingParams
    way: str
    leaves_after: int | None = None
    """Pieces after which the client of a stream is gone."""
    fault: type[Exception] | None = None
    """What a bad request must be answered with."""
    results: list[Any] = field(default_factory=list)
    tokens: tuple[int, ...] = ()
    """What a client saw that left."""
    text: str = ""
    left: bool = False
    error: Exception | None = None


def settle(decoder: DSparkDecoder) -> None:
    """Waits until nothing runs or waits."""
    for _ in range(3000):
        stats = decoder.stats()
        if stats["running"] == stats["queued"] == 0:
            return
        time.sleep(0.01)
    raise AssertionError(f"the decoder does not come to rest: {decoder.stats()}")


def draw_jobs(random_: random.Random, count: int, decoder: DSparkDecoder) -> list[Job]:
    """Half of the prompts begin like others; one in twelve is bad, one stream in four is left early."""
    vocabulary = decoder.models.target.config.vocab_size
    window = decoder.info()["max_model_len"]
    heads = [[random_.randrange(vocabulary) for _ in range(n)] for n in (17, 33, 40, 64)]
    return [_draw(random_, vocabulary, window, heads) for _ in range(count)]


def _draw(random_: random.Random, vocabulary: int, window: int, heads: list[list[int]]) -> Job:
    tail = [random_.randrange(vocabulary) for _ in range(random_.randint(1, 24))]
    prompt = (random_.choice(heads) if random_.random() < 0.5 else []) + tail
    way = random_.choice(WAYS)
    streams = way.endswith("stream")
    job = Job(prompt, _params(random_, vocabulary, streams), way)
    if streams and random_.random() < 0.25:
        job.leaves_after = random_.randint(0, 4)
    if random_.random() < 1 / 12:
        job.prompt, job.fault = random_.choice(
            [([vocabulary], RequestError), ([-1, 5], RequestError), ([3] * (window + 1), CapacityError)]
        )
    return job


def _params(random_: random.Random, vocabulary: int, streams: bool) -> SamplingParams:
    chance = random_.random
    most = random_.choice([0, 1, 2, 3, 8, 16, 24, 40])
    samplings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 20, "presence_penalty": 0.5},
        {"temperature": 1.2, "top_p": 0.8, "min_p": 0.02, "frequency_penalty": 0.2},
    ]
    return SamplingParams(
        **random_.choice(samplings),
        max_tokens=most,
        min_tokens=random_.randint(0, most) if chance() < 0.1 else 0,
        seed=random_.getrandbits(64),
        stop=random_.choice(["e", "\n", ["th", "se"], "  "]) if chance() < 0.2 else None,
        stop_token_ids=[random_.randrange(vocabulary) for _ in range(8)] if chance() < 0.2 else None,
        include_stop_str_in_output=chance() < 0.5,
        logit_bias={random_.randrange(vocabulary): 2.0} if chance() < 0.1 else None,
        logprobs=2 if chance() < 0.05 else None,
        n=1 if streams or chance() < 0.7 else random_.randint(2, 3),
        speculative=chance() < 0.9,
        timeout=random_.choice([0.0, 0.02, 0.1]) if chance() < 0.05 else 300.0,
    )


def run_jobs(decoder: DSparkDecoder, jobs: list[Job], seed: int, threads: int = 6, tasks: int = 10) -> None:
    """Threads take the jobs in order; those for `astream` are taken by tasks of one event loop."""
    failures: list[BaseException] = []

    def guarded(work: Any, *args: Any) -> None:
        try:
            work(*args)
        except BaseException as error:  # the test's thread raises it
            failures.append(error)

    blocking = _Shared([job for job in jobs if job.way != "astream"])
    loop = _Shared([job for job in jobs if job.way == "astream"])
    workers = [
        threading.Thread(target=guarded, args=(_thread, decoder, blocking, random.Random(seed + i)))
        for i in range(threads)
    ]
    workers.append(threading.Thread(target=guarded, args=(asyncio.run, _loop(decoder, loop, seed, tasks))))
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failures:
        raise failures[0]
    settle(decoder)


class _Shared:
    """A list that several threads take from."""

    def __init__(self, jobs: list[Job]) -> None:
        self._jobs, self._lock = iter(jobs), threading.Lock()

    def take(self, count: int = 1) -> list[Job]:
        with self._lock:
            return list(islice(self._jobs, count))


def _thread(decoder: DSparkDecoder, shared: _Shared, random_: random.Random) -> None:
    while several := shared.take():
        if several[0].way == "list":
            several += shared.take(random_.randint(0, 5))
            results = decoder.generate([job.prompt for job in several], [job.params for job in several])
            for job, result in zip(several, results, strict=True):
                job.results = result if isinstance(result, list) else [result]
        else:
            _one(decoder, several[0])
        time.sleep(random_.choice([0.0, 0.0, 0.001, 0.005]))


def _one(decoder: DSparkDecoder, job: Job) -> None:
    try:
        if job.way == "whole" or job.params.n > 1:
            results: Any = decoder.generate(job.prompt, job.params)
            job.results = results if isinstance(results, list) else [results]
            return
        stream = decoder.stream(job.prompt, job.params)
        for count, piece in enumerate(stream):
            if count == job.leaves_after:
                job.left = True
                return  # the last reference goes with it
            _note(job, piece)
    except (CapacityError, RequestError) as error:
        job.error = error


def _note(job: Job, piece: Any) -> None:
    job.tokens += piece.token_ids
    job.text += piece.text
    if piece.result is not None:
        assert (piece.result.token_ids, piece.result.text) == (job.tokens, job.text), (
            "pieces join to the whole"
        )
        job.results = [piece.result]


async def _loop(decoder: DSparkDecoder, shared: _Shared, seed: int, tasks: int) -> None:
    async def work(random_: random.Random) -> None:
        while several := shared.take():
            await _one_async(decoder, several[0], random_)
            await asyncio.sleep(random_.choice([0.0, 0.001, 0.005]))

    await asyncio.gather(*(work(random.Random(seed + 1000 + i)) for i in range(tasks)))


async def _one_async(decoder: DSparkDecoder, job: Job, random_: random.Random) -> None:
    async def read() -> None:
        async for piece in decoder.astream(job.prompt, job.params):
            _note(job, piece)

    try:
        if job.leaves_after is None:
            await read()
            return
        task = asyncio.create_task(read())
        await asyncio.sleep(0.002 * job.leaves_after * random_.random())
        task.cancel()
        job.left = not job.results
        await task
    except asyncio.CancelledError:
        job.left = not job.results
    except (CapacityError, RequestError) as error:
        job.error = error


def check(jobs: list[Job], alone: DSparkDecoder, *, any_temperature: bool) -> dict[str, int]:
    """Compares with `alone`, a decoder that runs one request at a time; counts the jobs of each kind.

    Every text that is a function of its request alone is the same, and one that was cut short its beginning.
    """
    counts = dict.fromkeys(("whole", "cut", "refused", "bad", "free"), 0)
    for job in jobs:
        counts[_check_one(job, alone, any_temperature)] += 1
    return counts


def _check_one(job: Job, alone: DSparkDecoder, any_temperature: bool) -> str:
    error = job.error or next((r.error for r in job.results if r.error is not None), None)
    if job.fault is not None:
        assert isinstance(error, job.fault) or job.left or isinstance(error, QueueFullError), (job, error)
        return "bad"
    if isinstance(error, QueueFullError):
        return "refused"
    assert error is None, (job, error)
    if not any_temperature and job.params.temperature != 0:
        assert all(len(r.token_ids) <= (job.params.max_tokens or 0) for r in job.results)
        return "free"
    expected: Any = alone.generate(job.prompt, replace(job.params, timeout=None))
    if job.left:
        assert job.tokens == expected.token_ids[: len(job.tokens)], (job, expected)
        assert expected.text.startswith(job.text)
        return "cut"
    wholes = expected if isinstance(expected, list) else [expected]
    assert len(wholes) == len(job.results) > 0, job
    for found, whole in zip(job.results, wholes, strict=True):
        if found.finish_reason == "abort":
            assert found.token_ids == whole.token_ids[: len(found.token_ids)], (job, found, whole)
            continue
        assert found.token_ids == whole.token_ids, (job, found, whole)
        assert (found.text, found.finish_reason) == (whole.text, whole.finish_reason), (job, found, whole)
        assert found.stop_reason == whole.stop_reason
    return "cut" if any(r.finish_reason == "abort" for r in job.results) else "whole"


def rounds_of(jobs: list[Job]) -> Iterator[Any]:
    """Every round that a client was told of."""
    return (r for job in jobs for result in job.results for r in result.rounds)


def check_rest(decoder: DSparkDecoder) -> dict[str, Any]:
    """Nothing runs, waits or holds pages but kept prefixes. Returns the stats."""
    settle(decoder)
    for _ in range(500):  # pages are counted at the end of the round whose end the clients know already
        stats = decoder.stats()
        if stats["pages"]["used"] == stats["pages"]["kept"]:
            break
        time.sleep(0.01)
    assert stats["queued"] == stats["running"] == stats["prefilling"] == 0, stats
    assert stats["pages"]["used"] == stats["pages"]["kept"] <= stats["pages"]["total"], stats
    assert stats["verified"] >= stats["accepted"] and stats["drafted"] >= stats["verified"], stats
    return stats
