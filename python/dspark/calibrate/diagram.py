"""Reliability diagrams; needs the extra `plots`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dspark.calibrate.scores import Scores

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Curve = tuple[str, Scores]
"""Its name, and the scores with its bins."""


def reliability_diagram(panels: Sequence[tuple[str, Sequence[Curve]]]) -> Figure:
    """One panel for each title: observed frequency against predicted probability.

    The area of a point is proportional to the share of its bin.
    """
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * columns, 3.1 * rows + 0.3), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis, (title, curves) in zip(axes, panels, strict=False):
        _panel(axis, title, curves)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    figure.supxlabel("predicted probability")
    figure.supylabel("share accepted")
    return figure


def _panel(axis: Any, title: str, curves: Sequence[Curve]) -> None:
    axis.plot([0, 1], [0, 1], color="0.7", linewidth=1, linestyle="--")
    for name, scores in curves:
        label = name if scores.ece is None else f"{name}, ECE {scores.ece:.1%}"
        predicted, happened = [b.predicted for b in scores.bins], [b.happened for b in scores.bins]
        [line] = axis.plot(predicted, happened, linewidth=1, label=label)
        areas = [400 * b.count / scores.count for b in scores.bins]
        axis.scatter(predicted, happened, s=areas, color=line.get_color(), alpha=0.5)
    axis.set(title=title, xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
    axis.legend(fontsize=7, loc="upper left")
