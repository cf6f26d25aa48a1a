"""Engines end with their decoder, and with the interpreter."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time

from dspark import DSparkDecoder, SamplingParams

PROMPT = "def read(self, size):\n"


def engines() -> int:
    return sum(thread.name == "dspark-engine" for thread in threading.enumerate())


def test_a_decoder_that_is_dropped_ends_its_engine() -> None:
    before = engines()
    decoder = DSparkDecoder.from_pretrained("tiny", "tiny-draft", policy="fixed")
    decoder.generate(PROMPT, SamplingParams(max_tokens=5))
    assert engines() == before + 1
    del decoder
    gc.collect()
    for _ in range(100):
        if engines() == before:
            break
        time.sleep(0.02)
    assert engines() == before


def test_leaving_the_interpreter_ends_what_runs() -> None:
    script = (
        "from dspark import DSparkDecoder, SamplingParams\n"
        "decoder = DSparkDecoder.from_pretrained('tiny', 'tiny-draft', policy='fixed')\n"
        f"stream = decoder.stream({PROMPT!r}, SamplingParams(ignore_eos=True))\n"
        "print(next(stream).token_ids != ())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
