"""Interleaved measurement: the sides of a comparison take turns in one process, medians with their spread."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from dspark.serve.costs import device_name

SETTLE = 0.03
"""Seconds to wait before each timed run: OpenMP's workers spin for 10 ms or so after their last product,
on the core that the next side needs."""


@dataclass(frozen=True)
class Sample:
    """Seconds of one side, over its turns."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        """The middle half: first and third quartile."""
        if len(self.seconds) < 2:
            return self.seconds[0], self.seconds[0]
        quartiles = statistics.quantiles(self.seconds, n=4)
        return quartiles[0], quartiles[2]

    def __str__(self) -> str:
        low, high = self.spread
        return f"{self.median * 1e3:9.3f} ms [{low * 1e3:.3f}, {high * 1e3:.3f}]"


def keep_freed_memory() -> None:
    """Starts this script again with an allocator that keeps what is freed.

    glibc returns large buffers to the system at once, and code that allocates some per call then pays for
    page faults, which would be measured instead of the arithmetic.
    """
    if "MALLOC_TRIM_THRESHOLD_" not in os.environ:
        keep = {"MALLOC_TRIM_THRESHOLD_": str(1 << 32), "MALLOC_MMAP_THRESHOLD_": str(1 << 32)}
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **keep})


def interleaved(
    sides: Mapping[str, Callable[[], object]], turns: int, warmup: int = 2, repeats: int = 1
) -> dict[str, Sample]:
    """Runs every side `repeats` times in a row per turn, in rotating order; the time is that of one run."""
    names = list(sides)
    for _ in range(warmup):
        for name in names:
            sides[name]()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(turns):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            time.sleep(SETTLE)
            start = time.perf_counter()
            for _ in range(repeats):
                sides[name]()
            seconds[name].append((time.perf_counter() - start) / repeats)
    return {name: Sample(tuple(values)) for name, values in seconds.items()}


def machine() -> str:
    """One line that says what was measured on."""
    model = device_name(torch.device("cpu"))
    return f"{model}, {os.cpu_count()} cores, torch {torch.__version__}, {torch.get_num_threads()} threads"
