"""The results of a cell: numbers for JSON, rows for the table, and what falls short."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from dspark.bench.cells import PLAIN, Cell
from dspark.bench.ratios import Ratio, ratio_over_best
from dspark.bench.run import ModeRuns

SLOWEST = 0.95
"""A cell is marked if the median of "throughput" over the better of plain and "fixed" is below this."""


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
        if self.over_best.high is not None and self.over_best.high < 1.0:
            marks.append("interval below 1")
        if self.over_best.median < SLOWEST:
            marks.append(f"median below {SLOWEST}")
        return tuple(marks)

    def speed(self, mode: str) -> float:
        """Tokens per second of the whole engine: the median over turns."""
        return statistics.median(self.runs[mode].speeds)

    def user_speed(self, mode: str) -> float:
        """Tokens per second of one user: the median over turns."""
        return statistics.median(self.runs[mode].user_speeds)

    def acceptance_length(self, mode: str) -> float | None:
        """Tokens committed per request and round, pooled; rounds that drafted nothing count 1."""
        runs = self.runs[mode]
        return runs.committed / runs.rounds if mode != PLAIN and runs.rounds else None

    def verify_budget(self, mode: str) -> float | None:
        """Drafted tokens that the target checked, per request and round."""
        runs = self.runs[mode]
        return runs.verified / runs.rounds if mode != PLAIN and runs.rounds else None

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
            "tokens_per_second_per_user": self.user_speed(mode),
            "acceptance_length": self.acceptance_length(mode),
            "verify_budget": self.verify_budget(mode),
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


HEADER = (
    *("set", "T", "batch", "mode", "tok/s", "per user", "accepted", "budget", "loops"),
    *("over best", "95 %", "over fixed"),
)
"""The table's first row."""


def rows(report: CellReport) -> list[list[str]]:
    """A cell's rows, one for each mode; the first names the cell, and a star marks what falls short."""
    cell = report.cell
    names = [cell.prompts, f"{cell.temperature:g}", f"{cell.batch}"]
    shown = []
    for mode, runs in report.runs.items():
        numbers = [f"{report.speed(mode):.1f}", f"{report.user_speed(mode):.1f}"]
        numbers += [_number(report.acceptance_length(mode)), _number(report.verify_budget(mode))]
        loops = "-" if runs.looping_share is None else f"{runs.looping_share:.0%}"
        ratios = _ratios(report) if mode == "throughput" else [""] * 3
        shown.append([*names, mode, *numbers, loops, *ratios])
        names = [""] * 3
    return shown


def footnote(report: CellReport) -> str:
    """What falls short in a marked cell, for below the table."""
    cell = report.cell
    return f"* {cell.prompts}, T {cell.temperature:g}, batch {cell.batch}: {', '.join(report.marks)}"


def _ratios(report: CellReport) -> list[str]:
    best, fixed = report.over_best, report.over_fixed
    star = " *" if report.marks else ""
    return [
        "-" if best is None else f"{best.median:.2f} ({best.over}){star}",
        "-" if best is None or best.low is None else f"{best.low:.2f} to {best.high:.2f}",
        "-" if fixed is None else f"{fixed.median:.2f}",
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
