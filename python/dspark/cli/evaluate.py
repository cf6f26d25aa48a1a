"""Measures a draft on prompts: acceptance, speed and confidences, with baselines in the same run.

Each prompt is answered with the draft and with the target alone, one after the other. The baselines are the
same draft without its Markov head, and an n-gram lookup drafter whose acceptance is computed on the target's
own text. Intervals are by bootstrap over prompts. Answers that loop are counted separately, because they
flatter drafters. The confidence head is scored on prompts that calibration.json was not fitted to.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from dspark.cli.calibrate import add_regime_options, add_work_options, regimes
from dspark.cli.options import add_model_options, decoder_options, draft_of, load_models, template_options
from dspark.cli.show import Progress, print_json, print_text, table
from dspark.cli.unfinished import end_with, kept, named
from dspark.errors import ConfigError
from dspark.files import check_writable, write_whole

HELP = "measure a draft against its baselines"

SEED = 1_000_000_000
"""Far from the seeds of `dspark calibrate`: texts that confidences were fitted to cannot measure them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `dspark evaluate`."""
    from dspark.serve.options import POLICIES

    add_work_options(parser, tokens=256, samples=1, seed=SEED)
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="one page with tables and plots (needs matplotlib, the extra `plots`)",
    )
    parser.add_argument(
        "--policy",
        default="fixed",
        choices=POLICIES,
        help="fixed verifies whole blocks, so that every position is seen and the confidence head is scored; "
        "throughput is what decoders do by default, and drafts only where it pays",
    )
    parser.add_argument(
        "--confidence-threshold",
        type=float,
        metavar="C",
        help="for policy threshold: stop drafting before the first confidence below C",
    )
    add_model_options(parser)
    add_regime_options(parser)


def run(options: argparse.Namespace) -> int:
    """Runs `dspark evaluate`."""
    from dspark.calibrate.prompts import data_sets
    from dspark.calibrate.rollout import Plan
    from dspark.evaluate.report import NOTES, html, tables
    from dspark.evaluate.run import Evaluation, Evaluator
    from dspark.plots import require_matplotlib

    if draft_of(options) is None:
        raise ConfigError("--no-draft leaves nothing to evaluate")
    page: Path | None = options.html
    if page is not None:
        require_matplotlib()
        check_writable(page)
    plan = Plan(tokens=options.tokens, samples=options.samples, seed=options.seed)
    params = regimes(options)
    sets = data_sets(options.prompts or [], options.target)
    how = replace(decoder_options(options), max_batch_size=1)
    progress = Progress(silent=options.json)
    models = load_models(options, progress)
    evaluator = Evaluator(models, sets, params, plan, how, template_options(options))
    done, ended = kept(evaluator.run(progress))
    progress.clear()
    if ended is not None and not done:
        raise ended
    found = Evaluation(evaluator.info, done, None if ended is None else named(ended))
    # Printed first, so that no numbers are lost if the page cannot be drawn or written.
    if options.json:
        print_json(found.to_json())
    else:
        asked = found.info["data_sets"].items()
        print_text("prompts: " + ", ".join(f"{number} of {name}" for name, number in asked) + "\n")
        for regime in done:
            shown = [f"{title}\n{table(rows)}" for title, rows in tables(regime) if rows]
            print_text("\n\n".join([str(regime.regime), *shown, f"confidence head: {regime.head.note}\n"]))
        print_text("\n".join(NOTES))
    if page is not None:
        try:
            write_whole(page, html(found))
        except OSError as error:
            raise ConfigError(f"--html {page} cannot be written: {error}") from error
    return 0 if ended is None else end_with(ended, options.json)
