"""The plots of a report, over all answers, as SVG; needs the extra `plots`."""

from __future__ import annotations

from io import StringIO
from math import nan

from matplotlib.figure import Figure

from dspark.calibrate.diagram import reliability_diagram
from dspark.calibrate.scores import HeadScores
from dspark.evaluate.answers import Estimate
from dspark.evaluate.run import Evaluated

COLORS = {"plain": "0.5", "draft": "tab:blue", "block": "tab:orange", "ngram": "tab:green"}


def plots(regime: Evaluated) -> list[tuple[str, str]]:
    """The plots of one regime, each as (what it shows, SVG)."""
    shown = [
        ("Acceptance length: tokens committed per round, pooled", bars(regime, "acceptance_length_pooled")),
        ("Acceptance by position, all data sets", positions(regime)),
        ("Tokens per second, one request at a time", bars(regime, "tokens_per_second")),
    ]
    if regime.head.scores is not None:
        figure = reliability(regime.head.scores, regime.head.calibrated)
        shown.append(("Reliability of the confidence head", figure))
    return [(title, svg(figure)) for title, figure in shown]


def bars(regime: Evaluated, what: str) -> Figure:
    """A group of bars for each data set, a bar for each method that has the number, with its interval."""
    sets = list(regime.measured)
    methods = [m for m in COLORS if any(_estimate(regime, s, m, what) for s in sets)]
    figure = Figure(figsize=(2 + 1.6 * len(sets), 3.2), layout="constrained")
    axis = figure.subplots()
    width = 0.8 / max(len(methods), 1)
    for number, method in enumerate(methods):
        found = [(i, e) for i, s in enumerate(sets) if (e := _estimate(regime, s, method, what))]
        axis.bar(
            [i + (number - (len(methods) - 1) / 2) * width for i, _ in found],
            [e.value for _, e in found],
            width,
            yerr=[
                [nan if e.low is None else max(e.value - e.low, 0.0) for _, e in found],
                [nan if e.high is None else max(e.high - e.value, 0.0) for _, e in found],
            ],
            capsize=3,
            label=method,
            color=COLORS[method],
        )
    axis.set_xticks(range(len(sets)), sets, parse_math=False)
    if methods:
        axis.legend(fontsize=8)
    return figure


def positions(regime: Evaluated) -> Figure:
    """Acceptance after an accepted prefix, and survival of the whole prefix, by position, with intervals."""
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for method, color in COLORS.items():
        found = regime.measured["all"].get(method)
        if found is None or not found.every.positions:
            continue
        shown = found.every.positions
        at = range(1, len(shown) + 1)
        for axis, shares in ((left, [p.rate for p in shown]), (right, [p.survival for p in shown])):
            axis.plot(
                at, [nan if e is None else e.value for e in shares], marker="o", color=color, label=method
            )
            low = [nan if e is None or e.low is None else e.low for e in shares]
            high = [nan if e is None or e.high is None else e.high for e in shares]
            axis.fill_between(at, low, high, color=color, alpha=0.15, linewidth=0)
    left.set(title="accepted, given the prefix", xlabel="position", ylim=(0, 1))
    right.set(title="whole prefix accepted", xlabel="position", ylim=(0, 1))
    right.legend(fontsize=8)
    return figure


def reliability(head: HeadScores, calibrated: HeadScores | None) -> Figure:
    """Survivals against what happened: all positions, then each."""
    after = (
        [None] * (len(head.survival) + 1)
        if calibrated is None
        else [calibrated.overall, *calibrated.survival]
    )
    panels = []
    for number, (before, later) in enumerate(zip([head.overall, *head.survival], after, strict=True)):
        curves = [("head", before)] + ([] if later is None else [("calibrated", later)])
        panels.append((f"position {number}" if number else "all positions", curves))
    return reliability_diagram(panels)


def svg(figure: Figure) -> str:
    """The figure as an `<svg>` element."""
    stream = StringIO()
    figure.savefig(stream, format="svg")
    text = stream.getvalue()
    return text[text.index("<svg") :]


def _estimate(regime: Evaluated, data_set: str, method: str, what: str) -> Estimate | None:
    found = regime.measured[data_set].get(method)
    value: Estimate | None = None if found is None else getattr(found.every, what)
    return value
