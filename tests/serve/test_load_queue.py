"""A bounded queue: past it a `QueueFullError` at once; a list waits in its caller."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from dspark import CapacityError, ConfigError, DSparkDecoder, QueueFullError, RequestError, SamplingParams
from load_driver import settle

PROMPT = "def read(self, size):\n"
Decoders = Callable[..., DSparkDecoder]
ENDLESS = SamplingParams(temperature=0.0, ignore_eos=True)
SMALL = {"max_batch_size": 1, "max_queue_size": 2}


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **changes})


@contextmanager
def full(decoder: DSparkDecoder) -> Iterator[list[Any]]:
    """One runs, two wait, all of them endless and somebody else's."""
    streams: list[Any] = [decoder.stream(PROMPT, ENDLESS)]
    next(streams[0])
    streams += [decoder.stream(PROMPT, ENDLESS) for _ in range(2)]
    assert decoder.stats()["queued"] == 2
    yield streams
    for stream in streams:
        stream.close()
    settle(decoder)


def test_past_the_bound_everything_raises_at_once(decoders: Decoders) -> None:
    decoder = decoders(**SMALL)

    async def asynchronous() -> None:
        decoder.astream(PROMPT, greedy())

    with full(decoder):
        before = decoder.stats()["refused"]
        for call in (
            lambda: decoder.generate(PROMPT, greedy()),
            lambda: decoder.generate(PROMPT, greedy(n=3)),
            lambda: decoder.stream(PROMPT, greedy()),
            lambda: asyncio.run(asynchronous()),
        ):
            with pytest.raises(QueueFullError, match=r"max_queue_size = 2"):
                call()
        assert issubclass(QueueFullError, CapacityError)
        assert decoder.stats()["refused"] - before == 4 and decoder.stats()["queued"] == 2
    assert decoder.generate(PROMPT, greedy()).finish_reason == "length"


def test_a_list_whose_prompts_have_nobody_to_wait_for(decoders: Decoders) -> None:
    decoder = decoders(**SMALL)
    with full(decoder):
        bad, *refused = decoder.generate([[9999], PROMPT, PROMPT], greedy())
        assert isinstance(bad.error, RequestError)
        assert [type(r.error) for r in refused] == [QueueFullError] * 2
        assert {r.finish_reason for r in refused} == {"error"} and refused[0].token_ids == ()
        [samples] = decoder.generate([PROMPT], greedy(n=2))  # type: ignore[misc]
        assert [type(r.error) for r in samples] == [QueueFullError] * 2


def test_a_list_may_be_longer_than_the_queue(decoders: Decoders) -> None:
    decoder = decoders(**SMALL)
    prompts: list[Any] = [PROMPT, "x = ", [9999], "import os\n"] * 10
    expected = [decoder.generate(p, greedy()).token_ids if p != [9999] else () for p in prompts[:4]] * 10
    results = decoder.generate(prompts, greedy())
    assert [r.token_ids for r in results] == expected
    assert [r.error is None for r in results] == [p != [9999] for p in prompts]


def test_samples_may_be_more_than_the_queue(decoders: Decoders) -> None:
    decoder = decoders(**SMALL, dtype="float64", acceptance="coupled")
    params = SamplingParams(max_tokens=9, temperature=1.0, seed=5, n=12)
    alone: Any = decoders(dtype="float64", acceptance="coupled").generate(PROMPT, params)
    assert [s.token_ids for s in decoder.generate(PROMPT, params)] == [s.token_ids for s in alone]  # type: ignore[attr-defined]
    nested: Any = decoder.generate([PROMPT, "x"], params)
    assert [s.token_ids for s in nested[0]] == [s.token_ids for s in alone] and len(nested[1]) == 12


def test_two_lists_share_a_small_queue(decoders: Decoders) -> None:
    """Whoever finds it full waits for one of its own; who has none left to wait for is told so."""
    decoder = decoders(**SMALL)
    expected = decoder.generate(PROMPT, greedy()).token_ids
    results: list[Any] = []
    threads = [
        threading.Thread(target=lambda: results.extend(decoder.generate([PROMPT] * 20, greedy())))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 60
    assert all(r.token_ids == expected or isinstance(r.error, QueueFullError) for r in results)
    assert sum(r.error is None for r in results) >= 20


def test_a_timeout_counts_while_a_prompt_waits_in_its_caller(
    decoders: Decoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = decoders(**SMALL)
    waited: list[float] = []

    class Core:
        """The engine, and what is asked of it."""

        def submit(self, prompt: Any, params: SamplingParams, **more: Any) -> Any:
            waited.append(more["waited"])
            return core.submit(prompt, params, **more)

    core = decoder._engine.core
    monkeypatch.setattr(decoder._engine, "core", Core())
    results = decoder.generate([PROMPT] * 9, SamplingParams(temperature=0.0, ignore_eos=True, timeout=0.4))
    assert {r.finish_reason for r in results} == {"abort"}
    # Nobody ends before 0.4 s are over, so nothing is left of them for whoever had to wait for that.
    assert max(waited[:2]) < 0.4 and min(waited[4:]) >= 0.4
    assert all(r.timing.total_s >= 0.4 for r in results)


def test_ctrl_c_while_prompts_wait_in_the_caller(decoders: Decoders) -> None:
    decoder = decoders(**SMALL)
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        decoder.generate([PROMPT] * 40, ENDLESS)
    settle(decoder)
    assert decoder.generate(PROMPT, greedy()).finish_reason == "length"


def test_closing_while_prompts_wait_in_the_caller() -> None:
    decoder = DSparkDecoder.from_pretrained("tiny", "tiny-draft", **SMALL)  # type: ignore[arg-type]
    results: list[Any] = []
    caller = threading.Thread(target=lambda: results.extend(decoder.generate([PROMPT] * 40, ENDLESS)))
    caller.start()
    while decoder.stats()["queued"] < 2:
        time.sleep(0.001)
    decoder.close()
    caller.join(30)
    reasons = [r.finish_reason for r in results]
    assert reasons == sorted(reasons, key=["length", "abort", "error"].index) and len(reasons) == 40
    assert 0 < reasons.count("abort") <= 3 and reasons[-1] == "error"
    assert all("closed" in str(r.error) for r in results if r.error is not None)


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "8"])
def test_the_bound_is_a_whole_number(size: Any) -> None:
    with pytest.raises(ConfigError, match="max_queue_size must be a whole number"):
        DSparkDecoder.from_pretrained("tiny", "tiny-draft", max_queue_size=size)
