"""A steady random load for half an hour: memory stays flat, no cache is left behind, counts add up.

`DSPARK_SOAK_SECONDS` sets how long (default 1800).
"""

from __future__ import annotations

import gc
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from dspark import DSparkDecoder
from dspark.core import CostTable
from dspark.serve.runner import Runner
from load_driver import check, check_rest, draw_jobs, run_jobs

SECONDS = float(os.environ.get("DSPARK_SOAK_SECONDS", "1800"))
JOBS = 150
WARM_UP = 0.25
"""Share of the time after which memory is looked at first: by then every thread has had its arena of the
allocator, and kept prefixes fill the cache."""
GROWTH = 48 << 20
"""Bytes that the process may grow after that. The caches are bounded by `max_kv_tokens` (here below 1 MB), so
what is left is the allocator's: each batch of jobs starts new threads, and glibc returns their freed memory
only in part. A leak of one request's caches (100 kB) or result (10 kB) comes to more within minutes."""


TABLE = CostTable([(1, 1e-3), (8, 1.3e-3), (32, 2.5e-3), (64, 5e-3)])


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def caches_of(decoder: DSparkDecoder) -> int:
    """Requests whose caches the decoder's runner holds."""
    target = decoder.models.target
    [runner] = [o for o in gc.get_objects() if isinstance(o, Runner) and o.target is target]
    return len(runner._caches)


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 600)
def test_half_an_hour_of_random_load() -> None:
    options: dict[str, Any] = {
        "dtype": "float64",
        "acceptance": "coupled",
        "policy": "throughput",
        "cost_table": TABLE,
        "max_model_len": 160,
        "max_kv_tokens": 208,
        "max_batch_size": 8,
    }
    started = time.monotonic()
    memory: list[tuple[float, int]] = []
    finished = 0
    with (
        DSparkDecoder.from_pretrained("tiny", "tiny-draft", **options, max_queue_size=24) as decoder,
        DSparkDecoder.from_pretrained("tiny", **{**options, "max_batch_size": 1}) as alone,
    ):
        seed = 0
        while (passed := time.monotonic() - started) < SECONDS:
            jobs = draw_jobs(random.Random(seed), JOBS, decoder)
            run_jobs(decoder, jobs, seed)
            stats = check_rest(decoder)
            check(jobs, alone, any_temperature=True)
            ended = sum(len([r for r in job.results if r.timing.total_s > 0]) for job in jobs)
            assert ended <= stats["finished"] - finished <= 3 * JOBS, stats
            finished = stats["finished"]
            held = caches_of(decoder)
            assert held <= stats["pages"]["kept"], f"{held} caches are held, {stats['pages']}"
            del jobs
            gc.collect()
            memory.append((passed, resident()))
            seed += 1
    warm = next(size for at, size in memory if at >= WARM_UP * SECONDS)
    grown = memory[-1][1] - warm
    print(f"{seed * JOBS} jobs, {finished} requests, {warm / 2**20:.0f} MB, grown by {grown / 2**20:.1f} MB")
    assert stats["preemptions"] > 0 and stats["reused_tokens"] > 0 and stats["accepted"] > 0
    assert len(memory) > 4 and grown < GROWTH, memory
