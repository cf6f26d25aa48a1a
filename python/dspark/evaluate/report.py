"""An evaluation as tables of text, and as one HTML page."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from typing import Any

from dspark.calibrate.scores import HeadScores
from dspark.evaluate.answers import Estimate
from dspark.evaluate.head import Head
from dspark.evaluate.numbers import Measured, Numbers
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
    "verify rate": lambda n: _share(n.verify_rate),
    "no draft": lambda n: text(n.share_without_draft, ".0%"),
    "accepted": lambda n: _share(n.acceptance_rate),
    "tokens/s": lambda n: _estimate(n.tokens_per_second, 1),
    "over plain": lambda n: _estimate(n.over_plain),
}

NOTES = (
    "intervals: 95 %, by bootstrap over prompts; none below 3 prompts",
    "acceptance length: tokens that a round commits, including the corrected or bonus one; 1 means no gain",
    "verify rate: verified tokens per round over the block size; at the end of an answer there is room for "
    "less than a block",
    "no draft: rounds in which nothing is drafted; they count in acceptance length and verify rate",
    "looping: less than half of the 4-grams are distinct, in the whole answer or in any ending of it of 32 "
    "tokens or more",
)
"""What the columns mean."""


def tables(regime: Evaluated) -> list[tuple[str, list[Row]]]:
    """The titles and rows of one regime's tables; no "without looping answers" tables if no answer loops."""
    loops = any(m.looping for methods in regime.measured.values() for m in methods.values())
    shown = [("all answers", main_rows(regime), position_rows(regime, lambda m: m.every))]
    if loops:
        straight = position_rows(regime, lambda m: m.without_looping)
        shown.append(("without looping answers", without_looping_rows(regime), straight))
    found = [(f"Acceptance and speed, {which}", rows) for which, rows, _ in shown]
    found += [(f"Acceptance by position, {which}", rows) for which, _, rows in shown]
    return [*found, ("Confidence head: survival against what was accepted", head_rows(regime.head))]


def main_rows(regime: Evaluated) -> list[Row]:
    """A row for each data set and method, below a heading."""
    rows: list[Row] = [("data set", "method", *_COLUMNS, "looping", "length if looping")]
    for data_set, methods in regime.measured.items():
        for method, m in methods.items():
            loops = None if m.of_looping is None else m.of_looping.acceptance_length_pooled
            cells = [show(m.every) for show in _COLUMNS.values()]
            rows.append((data_set, method, *cells, text(m.looping, ".0%"), _estimate(loops)))
    return rows


def without_looping_rows(regime: Evaluated) -> list[Row]:
    """The same of the answers that do not loop; no row for a method all of whose answers do."""
    rows: list[Row] = [("data set", "method", *_COLUMNS)]
    for data_set, methods in regime.measured.items():
        kept = [(method, m.without_looping) for method, m in methods.items() if m.without_looping is not None]
        rows += [(data_set, method, *(show(n) for show in _COLUMNS.values())) for method, n in kept]
    return rows


def position_rows(regime: Evaluated, part: Callable[[Measured], Numbers | None]) -> list[Row]:
    """Acceptance by position in each data set: given the prefix, and of the whole prefix."""
    positions = {
        data_set: {method: n.positions for method, m in methods.items() if (n := part(m)) is not None}
        for data_set, methods in regime.measured.items()
    }
    drafting = [m for m in METHODS if any(found.get(m) for found in positions.values())]
    columns = [f"{m} {what}" for m in drafting for what in ("given prefix", "whole prefix")]
    rows: list[Row] = [("data set", "position", *columns)]
    for data_set, found in positions.items():
        for k in range(max(map(len, found.values()), default=0)):
            at = [found[m][k] if found.get(m) else None for m in drafting]
            cells = [_share(e) for p in at for e in ((p.rate, p.survival) if p else (None, None))]
            rows.append((data_set, str(k + 1), *cells))
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
    """One page with everything in it; plots need the extra `plots`."""
    from jinja2 import Environment

    from dspark.evaluate.plots import plots

    source = files("dspark.evaluate").joinpath("report.html.jinja").read_text(encoding="utf-8")
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(source)
    regimes = [
        {
            "name": str(regime.regime),
            "head_note": regime.head.note,
            "tables": tables(regime),
            "plots": plots(regime),
        }
        for regime in evaluation.regimes
    ]
    return page.render(
        info=evaluation.info, methods=METHODS, notes=NOTES, regimes=regimes, error=evaluation.error
    )


def _estimate(value: Estimate | None, digits: int = 2, unit: str = "") -> str:
    if value is None:
        return "-"
    interval = "-" if value.low is None else f"{value.low:.{digits}f}, {value.high:.{digits}f}"
    return f"{value.value:.{digits}f}{unit} [{interval}]"


def _share(value: Estimate | None) -> str:
    """In percent."""
    scaled = None if value is None else value.times(100)
    return _estimate(scaled, 1, "%")
