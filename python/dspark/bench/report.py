"""What a cell showed: numbers for JSON, a row for the table, and what falls short."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from dspark.bench.cells import PLAIN, Cell, Grid
from dspark.bench.ratios import Ratio, ratio_over_best
from dspark.bench.run import ModeRuns

SLOWEST = 0.95
"""A median of "throughput" over the better of plain and "fixed" below this is marked."""


@dataclass(frozen=True, slots=True)
class CellReport:
    """A cell that was measured."""

    cell: Cell
    runs: dict[str, ModeRuns]
    over_best: Ratio | None
    """The throughput policy over the better of plain and fixed (of those that were measured)."""
    over_fixed: Ratio | None

    @property
    def marks(self) -> tuple[str, ...]:
        """What falls short of "never slower"."""
        if self.over_best is None:
            return ()
        marks = []
        if self.over_best.high < 1.0:
            marks.append("interval below 1")
        if self.over_best.median < SLOWEST:
            marks.append(f"median below {SLOWEST}")
        return tuple(marks)

    def speed(self, mode: str) -> float:
        """Tokens per second of the whole engine: the median over turns."""
        return statistics.median(self.runs[mode].speeds)

    def to_json(self) -> dict[str, Any]:
        """One entry of `cells` in `dspark bench --json`."""
        return {
            "set": self.cell.prompts,
            "temperature": self.cell.temperature,
            "batch": self.cell.batch,
            "modes": {mode: self._mode_to_json(mode) for mode in self.runs},
            "throughput_over_best": None if self.over_best is None else asdict(self.over_best),
            "throughput_over_fixed": None if self.over_fixed is None else asdict(self.over_fixed),
            "marks": list(self.marks),
        }

    def _mode_to_json(self, mode: str) -> dict[str, Any]:
        runs = self.runs[mode]
        return {
            "tokens_per_second": self.speed(mode),
            "tokens_per_second_per_user": statistics.median(runs.user_speeds),
            "acceptance_length": acceptance_length(mode, runs),
            "verify_budget": verify_budget(mode, runs),
            "looping_share": runs.looping_share,
            "speeds": runs.speeds,
        }


def report_cell(cell: Cell, runs: dict[str, ModeRuns]) -> CellReport:
    """Compares the modes of a cell."""
    over_best = over_fixed = None
    if "throughput" in runs:
        mine = runs["throughput"].speeds
        others = {mode: runs[mode].speeds for mode in (PLAIN, "fixed") if mode in runs}
        over_best = ratio_over_best(mine, others)
        if "fixed" in runs:
            over_fixed = ratio_over_best(mine, {"fixed": runs["fixed"].speeds})
    return CellReport(cell, runs, over_best, over_fixed)


def acceptance_length(mode: str, runs: ModeRuns) -> float | None:
    """Tokens committed per request and round, pooled; rounds that drafted nothing count 1."""
    return runs.committed / runs.rounds if mode != PLAIN and runs.rounds else None


def verify_budget(mode: str, runs: ModeRuns) -> float | None:
    """Drafted tokens that the target checked, per request and round."""
    return runs.verified / runs.rounds if mode != PLAIN and runs.rounds else None


def header(grid: Grid) -> list[str]:
    """The table's first row."""
    return [
        *("set", "T", "batch"),
        *(f"{mode}, tok/s" for mode in grid.modes),
        *("per user", "accepted", "budget", "over best", "95 %", "over fixed", "loops", ""),
    ]


def row(report: CellReport, grid: Grid) -> list[str]:
    """A cell's row; "per user", "accepted" and "budget" are those of the last policy."""
    mode = grid.modes[-1]
    runs, best, fixed = report.runs[mode], report.over_best, report.over_fixed
    return [
        *(report.cell.prompts, f"{report.cell.temperature:g}", f"{report.cell.batch}"),
        *(f"{report.speed(each):.1f}" for each in grid.modes),
        f"{statistics.median(runs.user_speeds):.1f}",
        _number(acceptance_length(mode, runs)),
        _number(verify_budget(mode, runs)),
        "-" if best is None else f"{best.median:.2f} ({best.over})",
        "-" if best is None else f"{best.low:.2f} to {best.high:.2f}",
        "-" if fixed is None else f"{fixed.median:.2f}",
        "-" if runs.looping_share is None else f"{runs.looping_share:.0%}",
        ", ".join(report.marks),
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
