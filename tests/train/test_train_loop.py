"""What the loop says of the time."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dspark.train.loop import Loop, Pace, Progress
from dspark.train.optimiser import Rate
from dspark.train.report import Log
from dspark.train.step import Measured
from training import ALONE


def test_the_time_left_goes_by_the_steps_of_this_command(tmp_path: Path) -> None:
    """The steps before it may have been taken on another machine."""
    measured: Any = SimpleNamespace(gradient=lambda *_: Measured(1.0, {}, 1.0, [0.5], 10))
    nothing: Any = SimpleNamespace(step=lambda *_: 0.0)
    conversation: Any = None
    lines: list[str] = []
    loop = Loop(
        measured,
        nothing,
        [conversation],
        ALONE,
        pace=Pace(steps=1003, sequences=1, report_every=1),
        rate=Rate(1e-3, 1003),
        clip=1.0,
        seed=0,
        started=0.0,
        evaluate=dict,
        checkpoint=lambda _: None,
        log=Log(tmp_path, 1000, False),
        say=lines.append,
    )
    assert loop.run(Progress(step=1000, seconds=100_000.0)).step == 1003
    assert len(lines) == 3
    for line in lines:  # 100 s a step before it, nothing in it
        step, _, left = line.partition(" s a step, ")
        assert float(step.rpartition(" ")[2]) < 1.0 and left.endswith(" s left") and len(left) < 10, line
