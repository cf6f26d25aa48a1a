"""A picture of a benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dspark.bench.cells import Grid
from dspark.bench.report import CellReport
from dspark.plots import save_plot


def plot_bench(reports: Sequence[CellReport], grid: Grid, path: Path, title: str) -> None:
    """Tokens per second against the batch: a row per temperature, a column per prompt set; PNG or SVG."""
    from matplotlib.figure import Figure

    rows, columns = len(grid.temperatures), len(grid.sets)
    figure = Figure(figsize=(4 * columns + 1, 3.2 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True)
    for i, temperature in enumerate(grid.temperatures):
        for j, name in enumerate(grid.sets):
            here = [r for r in reports if (r.cell.temperature, r.cell.prompts) == (temperature, name)]
            batches = [report.cell.batch for report in here]
            for mode in grid.modes:
                axes[i][j].plot(batches, [report.speed(mode) for report in here], "o-", label=mode)
            marked = [report for report in here if report.marks]
            if marked:
                at = [report.cell.batch for report in marked], [r.speed("throughput") for r in marked]
                axes[i][j].scatter(*at, s=120, facecolors="none", edgecolors="red", label="falls short")
            axes[i][j].set_title(f"{name}, temperature {temperature:g}")
            axes[i][j].set_xscale("log", base=2)
            axes[i][j].set_xticks(list(grid.batches), [str(batch) for batch in grid.batches])
            axes[i][j].set_ylim(bottom=0)
            axes[i][j].grid(alpha=0.3)
    for each in axes[-1]:
        each.set_xlabel("requests at once")
    for each in axes[:, 0]:
        each.set_ylabel("tokens per second")
    axes[0][0].legend()
    figure.suptitle(title)
    save_plot(figure, path)
