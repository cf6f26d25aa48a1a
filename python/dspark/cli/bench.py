"""Measures tokens per second of a pair: plain decoding and each policy, taking turns on one engine.

Speeds are those of decoding, without prefill, with a constant number of requests: when one ends, the next
begins. A cell is marked if "throughput" is slower there than the better of plain and "fixed", by more than
chance (which takes at least three turns to tell) or by more than 5 % in the median. Nothing else should run
on the machine meanwhile. The default target is smollm2 if it has been fetched and its draft is there (in a
checkout), else tiny.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.cli.options import (
    add_model_options,
    add_template_options,
    decoder_options,
    load_models,
    template_options,
)
from dspark.cli.show import Progress, print_json, print_text, say, table
from dspark.cli.unfinished import end_with, kept, named
from dspark.plots import check_plot

if TYPE_CHECKING:
    from dspark.bench.cells import Grid
    from dspark.bench.report import CellReport
    from dspark.bench.run import Bench
    from dspark.decoder import DSparkDecoder

HELP = "measure what speculation is worth on this machine"

_CHOSEN = ("batches", "temperatures", "turns", "tokens")
"""Fields of the grid that flags may set; the grid has the defaults."""

_SHORT: dict[str, Any] = {"batches": [1, 8, 32], "temperatures": [0.7], "turns": 5, "tokens": 48}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `dspark bench`."""
    from dspark.prompts import SETS
    from dspark.serve.options import POLICIES

    work = parser.add_argument_group("work")
    work.add_argument(
        "--short", action="store_true", help="a few cells and turns: minutes instead of an hour"
    )
    work.add_argument(
        "--batches", type=int, nargs="+", metavar="N", help="requests at once (default: 1 2 4 8 16 32)"
    )
    work.add_argument("--temperatures", type=float, nargs="+", metavar="T", help="default: 0 0.7")
    work.add_argument(
        "--sets",
        nargs="+",
        choices=SETS,
        metavar="SET",
        help=f"prompts: {', '.join(SETS)} (default: chat maths code; python for the embedded target)",
    )
    work.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE.jsonl",
        help='your own prompts: lines with "prompt", or with "turns", of which only the first is asked',
    )
    add_template_options(work)
    work.add_argument(
        "--policies",
        nargs="+",
        metavar="P",
        help=f"what to compare with plain decoding (default: {' '.join(POLICIES)})",
    )
    work.add_argument("--turns", type=int, metavar="N", help="times that each cell is measured (default: 9)")
    work.add_argument("--tokens", type=int, metavar="N", help="tokens per request (default: 64)")
    work.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw speeds, acceptance length and verify budget as FILE.png or FILE.svg",
    )
    rounds = add_model_options(parser)
    rounds.add_argument(
        "--confidence-threshold",
        type=float,
        default=0.5,
        metavar="C",
        help="for policy threshold: stop before the first confidence below C. One engine runs all policies, "
        "so these are calibrated if the draft's calibration.json fits; in a decoder they are the head's own",
    )
    parser.set_defaults(target=None)


def run(options: argparse.Namespace) -> int:
    """Runs `dspark bench`."""
    check_plot(options.plot)
    if options.target is None:
        options.target = _usual_target()
    progress = Progress(silent=options.json)
    from dspark.bench.prompt_sets import check_room
    from dspark.bench.run import Bench, timed_prompts
    from dspark.decoder import DSparkDecoder
    from dspark.durations import duration

    texts, template = _texts(options), template_options(options)
    grid = _grid(options, list(texts))
    options.max_batch_size, threshold = max(grid.batches), options.confidence_threshold
    del options.confidence_threshold  # not for the decoder, which starts with "throughput"
    how = decoder_options(options)
    with DSparkDecoder(lambda: load_models(options, progress), how) as decoder:
        is_own = options.prompts is not None
        prompts = _tokenised(texts, decoder, template, is_own=is_own)
        info = decoder.info() | {"template_options": template or None}
        check_room(prompts, info["max_model_len"], grid.tokens)
        bench = Bench(decoder, grid, prompts)
        estimate, started = bench.seconds_left(), time.perf_counter()
        if not options.json:
            _print_head(decoder, info, grid, threshold)
        say(f"{len(list(grid.cells()))} cells, about {duration(estimate)}")
        reports, ended = _measure(bench, progress, options.json)
        took = time.perf_counter() - started
    if ended is not None and not reports:
        raise ended
    repeats = sum(
        timed_prompts(r.cell, grid.turns, len(texts[r.cell.prompts])) < r.cell.batch * grid.turns
        for r in reports
    )
    if options.json:
        print_json(to_json(info, grid, reports, repeats, estimate, took, ended))
    else:
        marked = sum(bool(report.marks) for report in reports)
        print_text(f"\n{len(reports)} cells in {duration(took)}, {marked} of them marked")
        if repeats:
            print_text(
                f"{repeats} of the cells ask prompts more than once: their intervals show noise of the clock "
                "more than differences between prompts"
            )
    # After the numbers, which must not be lost if the plot cannot be drawn.
    if options.plot is not None:
        from dspark.bench.plot import plot_bench

        plot_bench(reports, grid, options.plot, f"{options.target}, {info['threads']} threads")
    return 0 if ended is None else end_with(ended, options.json)


def _usual_target() -> str:
    from dspark.errors import CheckpointError
    from dspark.pretrained import cache_root, resolve

    try:
        resolve("smollm2-draft", "draft")
    except CheckpointError:
        return "tiny"
    return "smollm2" if (cache_root() / "smollm2").is_dir() else "tiny"


def _texts(options: argparse.Namespace) -> dict[str, list[str]]:
    from dspark.errors import ConfigError
    from dspark.prompts import CODE_ALONE, CODE_BEGINNINGS, GENERAL, built_in, read_prompts

    if options.prompts is not None:
        if options.sets is not None:
            raise ConfigError("give either --prompts or --sets")
        return {options.prompts.stem: read_prompts(options.prompts)}
    usual = CODE_BEGINNINGS if options.target in CODE_ALONE else GENERAL[:1] if options.short else GENERAL
    return {name: built_in(name) for name in dict.fromkeys(options.sets or usual)}


def _grid(options: argparse.Namespace, sets: list[str]) -> Grid:
    from dspark.bench.cells import Grid
    from dspark.serve.options import POLICIES

    given = {name: getattr(options, name) for name in _CHOSEN if getattr(options, name) is not None}
    chosen = (_SHORT if options.short else {}) | given
    policies = POLICIES if options.policies is None else options.policies
    return Grid(sets=sets, policies=policies, threshold=options.confidence_threshold, **chosen)


def _tokenised(
    texts: dict[str, list[str]], decoder: DSparkDecoder, template: dict[str, Any], *, is_own: bool
) -> dict[str, list[list[int]]]:
    """`is_own`: the texts are the user's, whatever the file is called."""
    from dspark.bench.prompt_sets import tokenised
    from dspark.prompts import CODE_BEGINNINGS

    beginnings = () if is_own else CODE_BEGINNINGS
    return {
        name: tokenised(each, decoder.models, template, is_code=name in beginnings)
        for name, each in texts.items()
    }


def _measure(
    bench: Bench, progress: Progress, as_json: bool
) -> tuple[list[CellReport], BaseException | None]:
    """The cells, and what ended the measurement early, if anything did: an hour's cells must not be lost."""
    from dspark.bench.report import HEADER, footnote, report_cell, rows

    reports, ended = kept(report_cell(cell, runs) for cell, runs in bench.run(progress))
    progress.clear()
    if reports and not as_json:
        print_text(table([HEADER, *(row for report in reports for row in rows(report))]))
        for report in reports:
            if report.marks:
                print_text(footnote(report))
    return reports, ended


def _print_head(decoder: DSparkDecoder, info: dict[str, Any], grid: Grid, threshold: float) -> None:
    from dspark.serve.costs import device_name

    template = f"; template options {info['template_options']}" if info["template_options"] else ""
    print_text(
        f"target {info['target']}, {info['dtype']}\ndraft  {info['draft']}, {info['draft_dtype']}\n"
        f"{device_name(decoder.models.target.device)}, {info['threads']} threads, torch {info['torch']}; "
        f"block size {info['block_size']}, {info['acceptance']}, threshold {threshold:g}\n"
        f"{grid.tokens} tokens per request, {grid.turns} turns; cost table {info['cost_table']}{template}\n"
    )


def to_json(
    info: dict[str, Any],
    grid: Grid,
    reports: list[CellReport],
    repeats: int,
    estimate: float,
    took: float,
    ended: BaseException | None,
) -> dict[str, Any]:
    """What `dspark bench --json` prints; times in seconds. `repeats`: cells that ask prompts more than once.
    `ended`: why cells are missing, if some are."""
    names = (
        "target",
        "draft",
        "device",
        "dtype",
        "draft_dtype",
        "threads",
        "torch",
        "block_size",
        "acceptance",
        "calibration",
        "template_options",
    )
    return {
        **{name: info[name] for name in names},
        "cost_table": info["cost_table"],
        "tokens": grid.tokens,
        "turns": grid.turns,
        "confidence_threshold": grid.threshold,
        "estimated_s": estimate,
        "took_s": took,
        "cells_that_repeat_prompts": repeats,
        "cells": [report.to_json() for report in reports],
        **({} if ended is None else {"error": named(ended)}),
    }
