"""What a busy Python thread in the same process costs a decoder.

    python benchmarks/busy.py [--model tiny|smollm2] [--turns 5]

torch gives up the global interpreter lock in every operation, and gets it back when the busy thread has had
it for `sys.getswitchinterval()` (5 ms unless set). Tokens per second of one request at temperature 0, policy
"fixed": alone, and beside a thread that counts, with several intervals.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Callable

import torch

from dspark import DSparkDecoder, SamplingParams
from measure import interleaved, machine
from pairs import PAIRS, Pair

INTERVALS = (5e-3, 1e-3, 1e-4, 1e-5)


def beside_a_busy_thread(work: Callable[[], object], interval: float) -> None:
    """Runs `work` while another thread counts."""
    usual, stop = sys.getswitchinterval(), threading.Event()

    def count() -> None:
        number = 0
        while not stop.is_set():
            number += 1

    busy = threading.Thread(target=count)
    sys.setswitchinterval(interval)
    busy.start()
    try:
        work()
    finally:
        stop.set()
        busy.join()
        sys.setswitchinterval(usual)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(PAIRS), default="smollm2")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1, help="torch's: the busy thread needs a core, too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(machine())
    pair: Pair = PAIRS[options.model]
    with DSparkDecoder.from_pretrained(pair.target, pair.draft, policy="fixed") as decoder:
        prompt = pair.ids(decoder)
        params = SamplingParams(temperature=0.0, max_tokens=options.tokens, ignore_eos=True)

        def work() -> object:
            return decoder.generate(prompt, params)

        def beside(interval: float) -> Callable[[], object]:
            return lambda: beside_a_busy_thread(work, interval)

        sides = {"alone": work, **{f"{1e3 * each:g} ms": beside(each) for each in INTERVALS}}
        found = interleaved(sides, options.turns, warmup=1)
    for name, sample in found.items():
        low, high = (options.tokens / seconds for seconds in reversed(sample.spread))
        print(f"{name:9} {options.tokens / sample.median:8.1f} tokens/s [{low:.1f}, {high:.1f}]")


if __name__ == "__main__":
    main()
