"""A picture of a benchmark."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from dspark.bench.cells import Grid
from dspark.bench.report import CellReport
from dspark.plots import save_plot

Measure = Callable[[CellReport, str], float | None]

MEASURES: dict[str, Measure] = {
    "tokens per second": CellReport.speed,
    "tokens/s per user": CellReport.user_speed,
    "acceptance length": CellReport.acceptance_length,
    "verify budget": CellReport.verify_budget,
}


def plot_bench(reports: Sequence[CellReport], grid: Grid, path: Path, title: str) -> None:
    """Each measure against the batch: for each temperature a row per measure, a column per prompt set; PNG or
    SVG. Plain decoding has no acceptance length and no verify budget."""
    from matplotlib.figure import Figure

    places = [(t, name) for t in grid.temperatures for name in MEASURES]
    columns = len(grid.sets)
    figure = Figure(figsize=(4 * columns + 1, 2.2 * len(places)), layout="constrained")
    axes = figure.subplots(len(places), columns, squeeze=False, sharex=True)
    for i, (temperature, name) in enumerate(places):
        axes[i][0].set_ylabel(name)
        for each, prompts in zip(axes[i], grid.sets, strict=True):
            here = [r for r in reports if (r.cell.temperature, r.cell.prompts) == (temperature, prompts)]
            for mode in grid.modes:
                values = [MEASURES[name](report, mode) for report in here]
                numbers = [math.nan if value is None else value for value in values]
                each.plot([report.cell.batch for report in here], numbers, "o-", label=mode)
            marked = [report for report in here if report.marks and name == "tokens per second"]
            if marked:
                at = [report.cell.batch for report in marked], [r.speed("throughput") for r in marked]
                each.scatter(*at, s=120, facecolors="none", edgecolors="red", label="falls short")
            each.set_title(f"{prompts}, temperature {temperature:g}", fontsize="medium", parse_math=False)
            each.set_xscale("log", base=2)
            each.set_xticks(list(grid.batches), [str(batch) for batch in grid.batches])
            each.set_ylim(bottom=0)
            each.grid(alpha=0.3)
    for each in axes[-1]:
        each.set_xlabel("requests at once")
    axes[0][0].legend()
    figure.suptitle(title, parse_math=False)
    save_plot(figure, path)
