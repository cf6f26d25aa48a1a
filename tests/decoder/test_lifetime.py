"""Engines end with their decoder, and with the interpreter."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

import pytest

from dspark import CheckpointError, DSparkDecoder, SamplingParams
from dspark.serve.options import Options

PROMPT = "def read(self, size):\n"


def engines() -> int:
    return sum(thread.name == "dspark-engine" for thread in threading.enumerate())


def soon(count: int) -> bool:
    """Whether so many engines are left within two seconds."""
    for _ in range(100):
        if engines() == count:
            return True
        time.sleep(0.02)
    return False


def test_a_decoder_that_is_dropped_ends_its_engine() -> None:
    before = engines()
    decoder = DSparkDecoder.from_pretrained("tiny", "tiny-draft", policy="fixed")
    decoder.generate(PROMPT, SamplingParams(max_tokens=5))
    assert engines() == before + 1
    del decoder
    gc.collect()
    assert soon(before)


class Service:
    """Watches its decoder load, as a bar of progress does."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []
        self.decoder = DSparkDecoder.from_pretrained("tiny", device="cpu", progress=self.watch)

    def watch(self, done: int, total: int) -> None:
        self.seen.append((done, total))


def test_an_engine_keeps_nothing_of_whoever_made_it() -> None:
    before = engines()
    service = Service()
    decoder, there = service.decoder, weakref.ref(service)
    assert service.seen
    del service
    gc.collect()
    assert there() is None and decoder.state == "running"
    del decoder
    gc.collect()
    assert soon(before)


def test_a_decoder_goes_with_whoever_watched_it_load() -> None:
    before = engines()
    Service()
    gc.collect()
    assert soon(before)


def test_a_load_that_fails_leaves_nothing_behind() -> None:
    """Not in a circle of references either: whole models would wait in it for the next collection."""

    class Model:
        pass

    made: list[weakref.ref[Model]] = []

    def load() -> Any:
        model = Model()
        made.append(weakref.ref(model))
        raise CheckpointError("the draft is damaged")

    before = engines()
    gc.collect()
    gc.disable()
    try:
        try:
            DSparkDecoder(load, Options())
        except CheckpointError as error:
            assert str(error) == "the draft is damaged"
        assert soon(before) and len(made) == 1 and made[0]() is None
    finally:
        gc.enable()


def test_leaving_the_interpreter_ends_what_runs() -> None:
    script = (
        "from dspark import DSparkDecoder, SamplingParams\n"
        "decoder = DSparkDecoder.from_pretrained('tiny', 'tiny-draft', policy='fixed')\n"
        f"stream = decoder.stream({PROMPT!r}, SamplingParams(ignore_eos=True))\n"
        "print(next(stream).token_ids != ())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


FORKS = """
import os, sys
import numpy as np
from dspark import DSparkDecoder, SamplingParams, core
from dspark.errors import CapacityError, ConfigError

endless = SamplingParams(ignore_eos=True)
with DSparkDecoder.from_pretrained("tiny", "tiny-draft", device="cpu", policy="fixed") as decoder:
    # Two at a time, so that the core's own threads are there.
    decoder.generate([[1, 2, 3], [4, 5, 6]], SamplingParams(max_tokens=9, ignore_eos=True))
    stream = decoder.stream([1, 2, 3], endless)
    next(stream)
    if (child := os.fork()) == 0:
        said = [decoder.state]
        new = lambda: DSparkDecoder.from_pretrained("tiny", "tiny-draft", device="cpu", policy="fixed")
        for ask in (lambda: decoder.generate([1, 2, 3]), lambda: list(stream), decoder.stats, new):
            try:
                ask()
            except (CapacityError, ConfigError) as error:
                said.append(str(error))
        rows, params, noise = np.zeros((4, 8), np.float32), [SamplingParams()] * 2, [core.Noise(1, 1)] * 2
        said.append(len(core.accept_batch(rows, [[1], [2]], rows[:2], "rejection", params, noise)))
        print(*said, sep="\\n", flush=True)
        decoder.close()
        sys.exit(0)  # through the hooks of the interpreter's end
    assert os.waitpid(child, 0)[1] == 0
    assert decoder.state == "running"
    stream.close()
    assert len(decoder.generate([1, 2, 3], SamplingParams(max_tokens=9, ignore_eos=True)).token_ids) == 9
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_fork_has_no_decoder() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    why = "decoder was made before this process was forked: threads do not survive a fork, nor do torch's, so"
    state, *said, decided = done.stdout.splitlines()
    assert (state, len(said), decided) == ("forked", 4, "2")
    assert all(line.startswith(f"{'a' if line is said[-1] else 'the'} {why}") for line in said)


FAILS = """
import os, sys
from dspark import CheckpointError, DSparkDecoder, SamplingParams

try:
    DSparkDecoder.from_pretrained("no-such-model", device="cpu")
except CheckpointError:
    pass
if (child := os.fork()) == 0:
    with DSparkDecoder.from_pretrained("tiny", device="cpu") as decoder:
        print(len(decoder.generate([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True)).token_ids))
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_fork_after_a_load_that_failed_has_decoders() -> None:
    done = subprocess.run([sys.executable, "-c", FAILS], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr
