"""A request's timeout ends it wherever it is: in the queue, in its prompt, in its rounds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from commandline import talking_target
from dspark import DSparkDecoder, SamplingParams
from dspark.text import Tokenizer
from load_driver import settle

PROMPT = "def read(self, size):\n"
Decoders = Callable[..., DSparkDecoder]


def endless(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **changes})


def test_in_the_queue(decoders: Decoders) -> None:
    decoder = decoders(max_batch_size=1)
    with Busy(decoder) as running:
        late = decoder.generate([PROMPT] * 5, endless(timeout=0.1))
        assert {(r.finish_reason, r.token_ids) for r in late} == {("abort", ())}
        assert all(r.timing.queue_s >= 0.1 for r in late)
        assert next(running).token_ids, "who ran went on"
    settle(decoder)


def test_in_the_prompt(decoders: Decoders) -> None:
    decoder = decoders(prefill_chunk_size=1)
    late = decoder.generate([[3] * 2000] * 3, endless(timeout=0.1))
    assert {(r.finish_reason, r.token_ids) for r in late} == {("abort", ())}
    assert late[0].timing.prefill_s > 0
    settle(decoder)


def test_in_the_rounds(decoders: Decoders) -> None:
    decoder = decoders(dtype="float64")
    whole = decoder.generate(PROMPT, endless(max_tokens=600))
    late = decoder.generate([PROMPT] * 20, endless(timeout=0.5))
    assert {r.finish_reason for r in late} == {"abort"}
    assert any(r.token_ids for r in late)
    for result in late:
        shared = min(600, len(result.token_ids))
        assert result.token_ids[:shared] == whole.token_ids[:shared]
    settle(decoder)


def test_none_and_far_away(decoders: Decoders) -> None:
    for timeout in (None, 1e9, float("inf")):
        assert decoders().generate(PROMPT, endless(max_tokens=5, timeout=timeout)).finish_reason == "length"
    assert decoders().generate(PROMPT, endless(timeout=0)).finish_reason == "abort"


class Busy:
    """A stream that keeps the engine's only place."""

    def __init__(self, decoder: DSparkDecoder) -> None:
        self._stream = decoder.stream(PROMPT, endless())

    def __enter__(self) -> Any:
        next(self._stream)
        return self._stream

    def __exit__(self, *_: object) -> None:
        self._stream.close()


@pytest.mark.parametrize("way", ["one", "list", "samples", "chat", "stream", "astream"])
def test_what_a_prompt_takes_to_be_read_counts(way: str, reader: DSparkDecoder) -> None:
    """A long text takes a while: the timeout and the times count from the call, whichever it is."""

    async def last() -> Any:
        return [piece.result async for piece in reader.astream(PROMPT, endless(timeout=0.1))][-1]

    ways: dict[str, Callable[[], Any]] = {
        "one": lambda: reader.generate(PROMPT, endless(timeout=0.1)),
        "list": lambda: reader.generate([PROMPT], endless(timeout=0.1))[0],
        "samples": lambda: reader.generate(PROMPT, endless(timeout=0.1, n=2))[1],  # type: ignore[index]
        "chat": lambda: reader.chat([{"role": "user", "content": PROMPT}], endless(timeout=0.1)),
        "stream": lambda: list(reader.stream(PROMPT, endless(timeout=0.1)))[-1].result,
        "astream": lambda: asyncio.run(last()),
    }
    result = ways[way]()
    assert result.finish_reason == "abort"
    assert result.timing.total_s >= result.timing.queue_s >= 0.3


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DSparkDecoder]:
    """A decoder that takes 0.3 s to read a text, from a target with a chat template."""
    read = Tokenizer._encode

    def slowly(*arguments: Any, **more: Any) -> list[int]:
        time.sleep(0.3)
        return read(*arguments, **more)

    with DSparkDecoder.from_pretrained(talking_target(tmp_path), device="cpu") as decoder:
        monkeypatch.setattr(Tokenizer, "_encode", slowly)
        yield decoder
