"""Interleaved measurement: the sides of a comparison take turns in one process, medians with their spread."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch


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


def interleaved(sides: Mapping[str, Callable[[], object]], turns: int, warmup: int = 2) -> dict[str, Sample]:
    """Runs every side once per turn, in rotating order, and times each run."""
    names = list(sides)
    for _ in range(warmup):
        for name in names:
            sides[name]()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(turns):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = time.perf_counter()
            sides[name]()
            seconds[name].append(time.perf_counter() - start)
    return {name: Sample(tuple(values)) for name, values in seconds.items()}


def machine() -> str:
    """One line that says what was measured on."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = info.read_text(encoding="utf-8").splitlines()
        model = next(
            (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model
        )
    return f"{model}, {os.cpu_count()} cores, torch {torch.__version__}, {torch.get_num_threads()} threads"
