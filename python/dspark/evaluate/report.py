"""An evaluation as tables of text, and as one HTML page."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from typing import Any

from dspark.calibrate.scores import HeadScores
from dspark.evaluate.answers import Estimate
from dspark.evaluate.head import Head
from dspark.evaluate.numbers import Numbers
from dspark.evaluate.run import METHODS, Evaluated, Evaluation

Row = tuple[str, ...]


def text(value: Any, form: str = ".2f") -> str:
    """A number for a table, a dash where there is none."""
    return "-" if value is None else format(value, form)


_COLUMNS: dict[str, Callable[[Numbers], str]] = {
    "answers": lambda n: str(n.answers),
    "tokens": lambda n: str(n.tokens),
    "acceptance length (pooled)": lambda n: _estimate(n.acceptance_length_pooled),
    "(mean of requests)": lambda n: _estimate(n.acceptance_length_mean_of_requests),
    "verify rate": lambda n: text(n.verify_rate, ".1%"),
    "accepted": lambda n: text(n.acceptance_rate, ".1%"),
    "tokens/s": lambda n: _estimate(n.tokens_per_second, 1),
    "over plain": lambda n: _estimate(n.over_plain),
    "looping": lambda n: text(n.looping, ".0%"),
    "without looping": lambda n: _estimate(n.pooled_without_looping),
    "of looping": lambda n: _estimate(n.pooled_of_looping),
}


def main_rows(regime: Evaluated) -> list[Row]:
    """A row for each data set and method, below a heading."""
    rows: list[Row] = [("data set", "method", *_COLUMNS)]
    for data_set, methods in regime.numbers.items():
        rows += [(data_set, m, *(show(n) for show in _COLUMNS.values())) for m, n in methods.items()]
    return rows


def position_rows(regime: Evaluated) -> list[Row]:
    """Acceptance by position over all data sets: given the prefix, and of the whole prefix."""
    drafting = {m: n for m, n in regime.numbers["all"].items() if n.positions}
    rows: list[Row] = [
        ("position", *(f"{m} {what}" for m in drafting for what in ("given prefix", "prefix")))
    ]
    depth = max((len(n.positions) for n in drafting.values()), default=0)
    for k in range(depth):
        cells = [
            text(v, ".1%") for n in drafting.values() for v in (n.positions[k].rate, n.positions[k].survival)
        ]
        rows.append((str(k + 1), *cells))
    return rows


def head_rows(head: Head) -> list[Row]:
    """The confidence head's scores, raw and calibrated; none without a head."""
    heads = [("head", head.scores), ("calibrated", head.calibrated)]
    known: list[tuple[str, HeadScores]] = [(name, scores) for name, scores in heads if scores is not None]
    if not known:
        return []
    titles = [f"{name} {what}" for name, _ in known for what in ("ECE", "AUROC", "Brier")]
    rows: list[Row] = [("position", "rounds", "prefix accepted", *titles)]
    for k in range(-1, len(known[0][1].survival)):
        scores = [h.overall if k < 0 else h.survival[k] for _, h in known]
        cells = [c for s in scores for c in (text(s.ece, ".1%"), text(s.auroc, ".3f"), text(s.brier, ".3f"))]
        first = scores[0]
        name = "all" if k < 0 else str(k + 1)
        rows.append((name, str(first.count), text(first.happened, ".1%"), *cells))
    return rows


def html(evaluation: Evaluation) -> str:
    """One page with everything in it; plots need the extra `dspark[plots]`."""
    from jinja2 import Environment

    from dspark.evaluate.plots import plots

    source = files("dspark.evaluate").joinpath("report.html.jinja").read_text(encoding="utf-8")
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(source)
    regimes = [
        {
            "name": str(regime.regime),
            "head_note": regime.head.note,
            "tables": [
                ("Acceptance and speed", main_rows(regime)),
                ("Acceptance by position, all data sets", position_rows(regime)),
                ("Confidence head: survival against what was accepted", head_rows(regime.head)),
            ],
            "plots": plots(regime),
        }
        for regime in evaluation.regimes
    ]
    return page.render(info=evaluation.info, methods=METHODS, regimes=regimes)


def _estimate(value: Estimate | None, digits: int = 2) -> str:
    if value is None:
        return "-"
    return f"{value.value:.{digits}f} [{value.low:.{digits}f}, {value.high:.{digits}f}]"
