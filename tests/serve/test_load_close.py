"""Closing a busy decoder ends everybody who waits for it, and the interpreter ends whatever runs."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from dspark import CapacityError, DSparkDecoder, SamplingParams
from dspark.serve.models import Models
from dspark.serve.options import Options

PROMPT = "def read(self, size):\n"
ENDLESS = SamplingParams(temperature=0.0, ignore_eos=True)


class Callers:
    """Threads that ask for one endless text after the other, until they are told that it is over."""

    def __init__(self, decoder: DSparkDecoder) -> None:
        self._decoder = decoder
        self.reasons: list[str] = []
        self.errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._repeat, args=(ask,), daemon=True)
            for ask in (self._whole, self._list, self._stream, self._tasks)
            for _ in range(4)
        ]
        for thread in self._threads:
            thread.start()

    def _repeat(self, ask: Any) -> None:
        try:
            while True:
                ask()
        except CapacityError as error:
            self.errors.append(error)

    def _end(self, result: Any) -> None:
        self.reasons.append(result.finish_reason)
        if result.error is not None:
            raise result.error

    def _whole(self) -> None:
        self._end(self._decoder.generate(PROMPT, ENDLESS))

    def _list(self) -> None:
        for result in self._decoder.generate([PROMPT] * 40, ENDLESS):
            self._end(result)

    def _stream(self) -> None:
        for piece in self._decoder.stream(PROMPT, ENDLESS):
            if piece.result is not None:
                self._end(piece.result)

    def _tasks(self) -> None:
        async def one() -> None:
            async for piece in self._decoder.astream(PROMPT, ENDLESS):
                if piece.result is not None:
                    self._end(piece.result)

        async def several() -> None:
            await asyncio.gather(*(one() for _ in range(5)))

        asyncio.run(several())

    def join(self) -> None:
        for thread in self._threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in self._threads), "somebody waits for ever"


@pytest.mark.parametrize("closers", [1, 4])
def test_closing_a_busy_decoder_ends_everybody(closers: int) -> None:
    decoder = DSparkDecoder.from_pretrained("tiny", "tiny-draft", max_batch_size=8)
    callers = Callers(decoder)
    while decoder.stats()["passes"] < 3 or decoder.stats()["queued"] < 20:
        time.sleep(0.01)
    threads = [threading.Thread(target=decoder.close) for _ in range(closers)]
    for thread in threads:
        thread.start()
    with pytest.raises(CapacityError, match="closed"):
        while True:  # while it closes, too
            decoder.generate(PROMPT, SamplingParams(max_tokens=1))
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    callers.join()
    assert "abort" in callers.reasons and set(callers.reasons) <= {"abort", "error", "length"}
    assert len(callers.errors) == 16 and all("closed" in str(error) for error in callers.errors)
    assert decoder.stats()["running"] == decoder.stats()["queued"] == 0


def test_after_the_close_everything_is_refused_at_once() -> None:
    decoder = DSparkDecoder.from_pretrained("tiny", "tiny-draft")
    decoder.close()
    with pytest.raises(CapacityError, match="closed"):
        decoder.stream(PROMPT)
    results = decoder.generate([PROMPT, PROMPT])
    assert [(r.finish_reason, type(r.error)) for r in results] == [("error", CapacityError)] * 2

    async def main() -> None:
        with pytest.raises(CapacityError, match="closed"):
            decoder.astream(PROMPT)

    asyncio.run(main())
    assert decoder.stats()["running"] == 0 and decoder.info()["policy"]


def test_ctrl_c_while_models_load_leaves_no_engine() -> None:
    def engines() -> int:
        return sum(thread.name == "dspark-engine" for thread in threading.enumerate())

    def load() -> Models:
        threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        time.sleep(0.5)
        return Models.load("tiny", "tiny-draft")

    before = engines()
    with pytest.raises(KeyboardInterrupt):
        DSparkDecoder(load, Options())
    assert engines() == before + 1, "the load is still under way"
    for _ in range(500):
        if engines() == before:
            break
        time.sleep(0.02)
    assert engines() == before


def test_the_interpreter_ends_whatever_runs() -> None:
    """Daemon threads in the middle of everything; the main thread just falls off its end."""
    script = """
import asyncio, threading, time
from dspark import CapacityError, DSparkDecoder, SamplingParams
decoder = DSparkDecoder.from_pretrained("tiny", "tiny-draft")
ENDLESS = SamplingParams(ignore_eos=True, temperature=0.0)
def streams():
    for _ in decoder.stream("def", ENDLESS): pass
def lists():
    decoder.generate(["def"] * 50, ENDLESS)
def tasks():
    async def one():
        async for _ in decoder.astream("def", ENDLESS): pass
    async def several():
        await asyncio.gather(*(one() for _ in range(8)))
    asyncio.run(several())
def repeat(ask):
    try:
        while True: ask()
    except CapacityError: pass
for ask in (streams, lists, tasks) * 3: threading.Thread(target=repeat, args=(ask,), daemon=True).start()
while decoder.stats()["passes"] < 3: time.sleep(0.01)
print("end")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
