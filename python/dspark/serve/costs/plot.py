"""A picture of a cost table."""

from __future__ import annotations

from pathlib import Path

from dspark.plots import save_plot
from dspark.serve.costs.record import Costs


def plot_costs(costs: Costs, path: Path, title: str) -> None:
    """Milliseconds of target and draft passes, and tokens per second of a target pass; PNG or SVG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4))
    times, speeds = figure.subplots(1, 2)
    table = costs.table()
    widths = range(1, 1 + max(tokens for tokens, _, _ in costs.passes))
    times.plot(widths, [1e3 * table.seconds(n) for n in widths], color="grey", label="table, one request")
    for requests in sorted({requests for _, requests, _ in costs.passes}):
        points = [(tokens, seconds) for tokens, each, seconds in costs.passes if each == requests]
        times.scatter(
            *zip(*((n, 1e3 * s) for n, s in points), strict=True), label=f"target, {requests} at once"
        )
        speeds.plot(*zip(*((n, n / s) for n, s in points), strict=True), "o-", label=f"{requests} at once")
    times.scatter(*zip(*((n, 1e3 * s) for n, s in costs.draft), strict=True), marker="x", label="draft")
    for axes, unit in ((times, "milliseconds per pass"), (speeds, "tokens per second in a target pass")):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("tokens in the pass (requests for the draft)")
        axes.set_ylabel(unit)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title, parse_math=False)
    save_plot(figure, path)
