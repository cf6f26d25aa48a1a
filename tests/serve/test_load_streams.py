"""Streams under load: whoever leaves, however, cancels within a round; whoever reads gets everything once."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest

from dspark import CapacityError, DSparkDecoder, RequestError, SamplingParams
from load_driver import settle

PROMPT = "def read(self, size):\n"
Decoders = Callable[..., DSparkDecoder]
ENDLESS = SamplingParams(temperature=0.0, ignore_eos=True)


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 40, **changes})


def ends_within_a_round(decoder: DSparkDecoder, rounds: int = 1) -> bool:
    """Called right after the client left: the pass that runs may end, none begins."""
    before = decoder.stats()["passes"]
    settle(decoder)
    return bool(decoder.stats()["passes"] - before <= rounds)


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("leave", ["close", "drop", "cycle"])
def test_leaving_a_stream_cancels_its_request(decoders: Decoders, leave: str, begun: bool) -> None:
    """Also one that nobody began and somebody still holds, and one that only the collector finds."""
    decoder = decoders()
    stream: Any = decoder.stream(PROMPT, ENDLESS)
    if begun:
        next(stream)
    held = stream if leave == "close" else None
    if leave == "close":
        stream.close()
    elif leave == "cycle":
        cycle: list[Any] = [stream]
        cycle.append(cycle)
        del cycle
    del stream
    if leave == "cycle":
        gc.collect()
    assert ends_within_a_round(decoder)
    if held is not None:
        assert list(held) == []


def test_a_reader_gets_the_last_piece_when_another_thread_closes(decoders: Decoders) -> None:
    decoder = decoders()
    stream = decoder.stream(PROMPT, ENDLESS)
    pieces = [next(stream)]
    reader = threading.Thread(target=lambda: pieces.extend(stream))
    reader.start()
    stream.close()
    reader.join(20)
    assert not reader.is_alive()
    # Closed between two reads it ends without; closed during one, with the piece that says so.
    assert all(p.result is None or p.result.finish_reason == "abort" for p in pieces)
    settle(decoder)


def test_readers_of_one_stream_share_its_pieces(decoders: Decoders) -> None:
    decoder = decoders()
    whole = decoder.generate(PROMPT, greedy())
    stream = decoder.stream(PROMPT, greedy())
    pieces: list[Any] = []
    readers = [threading.Thread(target=lambda: pieces.extend(stream)) for _ in range(6)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(20)
    assert not any(reader.is_alive() for reader in readers)
    assert sorted(t for p in pieces for t in p.token_ids) == sorted(whole.token_ids)
    assert [p.result.token_ids for p in pieces if p.result] == [whole.token_ids]


def test_an_async_stream_begins_and_refuses_with_the_call(decoders: Decoders) -> None:
    decoder = decoders()
    with pytest.raises(RuntimeError, match="loop"):
        decoder.astream(PROMPT, greedy())

    async def main() -> None:
        with pytest.raises(RequestError, match="9999"):
            decoder.astream([9999])
        with pytest.raises(CapacityError, match="2049 tokens"):
            decoder.astream([1] * 2049)
        with pytest.raises(RequestError, match="one sample"):
            decoder.astream(PROMPT, SamplingParams(n=2))
        finished = decoder.stats()["finished"]
        stream = decoder.astream(PROMPT, greedy(max_tokens=3))
        while decoder.stats()["finished"] == finished:
            await asyncio.sleep(0.01)
        assert sum([piece.token_ids async for piece in stream], ()) != ()

    asyncio.run(main())


@pytest.mark.parametrize("leave", ["aclose", "drop", "break", "raise", "cancel", "timeout"])
@pytest.mark.parametrize("begun", [False, True])
def test_leaving_an_async_stream_cancels_its_request(decoders: Decoders, leave: str, begun: bool) -> None:
    decoder = decoders()

    async def read(stream: Any, until: int | None = None) -> None:
        count = 0
        async for _ in stream:
            count += 1
            if count == until and leave == "break":
                break
            if count == until:
                raise ArithmeticError

    async def main() -> None:
        stream: Any = decoder.astream(PROMPT, ENDLESS)
        if begun:
            await anext(stream)
        if leave == "aclose":
            await stream.aclose()
            assert [piece async for piece in stream] == []
        elif leave in ("break", "raise"):
            with contextlib.suppress(ArithmeticError):
                await read(stream, 2)
        elif leave == "cancel":
            task = asyncio.create_task(read(stream))
            await asyncio.sleep(0.05)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        elif leave == "timeout":
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(read(stream), 0.05)
        del stream
        assert ends_within_a_round(decoder)

    asyncio.run(main())


def test_an_event_loop_that_closes_cancels_its_streams(decoders: Decoders) -> None:
    decoder = decoders()
    loop = asyncio.new_event_loop()

    async def begin() -> list[Any]:
        streams = [decoder.astream(PROMPT, ENDLESS) for _ in range(5)]
        for stream in streams[:3]:
            await anext(stream)
        return streams

    streams = loop.run_until_complete(begin())
    assert decoder.stats()["running"] + decoder.stats()["queued"] == 5
    loop.close()
    # The first round that cannot wake the loop says so.
    assert ends_within_a_round(decoder, 3)
    assert len(streams) == 5, "they are held, and nobody closed them"


def test_a_task_that_waits_gets_the_last_piece_when_another_closes(decoders: Decoders) -> None:
    decoder = decoders()

    async def main() -> None:
        stream = decoder.astream(PROMPT, ENDLESS)
        await anext(stream)

        async def read() -> list[Any]:
            return [piece async for piece in stream]

        readers = [asyncio.create_task(read()) for _ in range(3)]
        await asyncio.sleep(0.02)
        await stream.aclose()
        for pieces in await asyncio.wait_for(asyncio.gather(*readers), 20):
            assert all(p.result is None or p.result.finish_reason == "abort" for p in pieces)

    asyncio.run(main())
    settle(decoder)


def test_threads_and_tasks_at_once(decoders: Decoders) -> None:
    """Everybody's text is the text alone, whether it came whole, in pieces, or in a list."""
    decoder = decoders(dtype="float64")
    prompts = ["import os\n", PROMPT, "class A:\n    ", "x = [", "for i in "]
    expected = [decoder.generate(p, greedy()) for p in prompts]
    tokens = [result.token_ids for result in expected]
    wrong: list[Any] = []

    def check(i: int, found: Any) -> None:
        if found != tokens[i % 5]:
            wrong.append((i, found))

    def whole(i: int) -> None:
        check(i, decoder.generate(prompts[i % 5], greedy()).token_ids)

    def pieces(i: int) -> None:
        check(i, sum((p.token_ids for p in decoder.stream(prompts[i % 5], greedy())), ()))

    def several(i: int) -> None:
        for k, result in enumerate(decoder.generate(prompts, greedy())):
            check(k, result.token_ids)

    def leave(i: int) -> None:
        next(decoder.stream(prompts[i % 5], ENDLESS))

    async def one(i: int) -> None:
        found: tuple[int, ...] = ()
        async for piece in decoder.astream(prompts[i % 5], greedy()):
            found += piece.token_ids
            if i % 4 == 3 and len(found) > 9:
                return  # leaves early
        check(i, found)

    async def tasks() -> None:
        await asyncio.gather(*(one(i) for i in range(20)))

    threads = [
        threading.Thread(target=work, args=(i,)) for work in (whole, pieces, several, leave) for i in range(6)
    ]
    threads += [threading.Thread(target=lambda: asyncio.run(tasks())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads) and wrong == []
    settle(decoder)
