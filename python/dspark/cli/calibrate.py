"""Fits the confidence head of a draft to what is really accepted, and writes calibration.json.

The pair answers prompts with whole blocks verified. Half of the prompts are used to fit one temperature per
position (sequential temperature scaling), a quarter to choose which of these to keep, and the last quarter
to score the confidences before and after. A calibration belongs to one acceptance rule, way of sampling and
number of Markov candidates: the file holds an entry for each, with digests of the prompts that were used to
fit and choose; other entries in the file stay. The policy "throughput" uses the file next to the draft.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark import __version__
from dspark.checkpoint.calibration import FILE_NAME, Entry, write_calibrations
from dspark.cli.options import (
    add_model_options,
    add_template_options,
    decoder_options,
    load_models,
    template_options,
)
from dspark.cli.show import Progress, print_json, print_text, table
from dspark.cli.unfinished import end_with, named
from dspark.errors import ConfigError
from dspark.files import check_writable
from dspark.paths import expanded
from dspark.sampling import SamplingParams

if TYPE_CHECKING:
    from dspark.calibrate.run import Fitted

HELP = "fit a draft's confidences to what is accepted"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `dspark calibrate`."""
    add_work_options(parser, tokens=128, samples=4)
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="what to write (default: calibration.json beside the draft)",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="reliability diagram (.svg or .png)")
    add_model_options(parser)
    add_regime_options(parser)


def add_work_options(parser: argparse.ArgumentParser, *, tokens: int, samples: int, seed: int = 0) -> None:
    """The flags that say how much to run, and on what."""
    work = parser.add_argument_group("work")
    work.add_argument(
        "--prompts",
        type=Path,
        action="append",
        metavar="FILE.jsonl",
        help='lines with "prompt", or with "turns", of which only the first is asked; may be repeated '
        "(default: built in)",
    )
    add_template_options(work)
    work.add_argument("--tokens", type=int, default=tokens, metavar="N", help="tokens per answer at most")
    work.add_argument(
        "--samples", type=int, default=samples, metavar="N", help="answers per prompt above temperature 0"
    )
    work.add_argument(
        "--seed",
        type=int,
        default=seed,
        metavar="S",
        help="seed of the first answer; the others count up from it",
    )


def add_regime_options(parser: argparse.ArgumentParser) -> None:
    """The flags that say how tokens are sampled."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--temperature",
        type=float,
        action="append",
        metavar="T",
        help="may be repeated (default: 0 and 0.7); 0 is greedy",
    )
    for flag, kind, meaning in (
        ("--top-k", int, "keep the K likeliest tokens"),
        ("--top-p", float, "keep the likeliest tokens up to this total probability"),
        ("--min-p", float, "keep tokens with at least this share of the largest probability"),
    ):
        group.add_argument(flag, type=kind, metavar=flag[-1].upper(), help=meaning)


def regimes(options: argparse.Namespace) -> list[SamplingParams]:
    """The sampling parameters that the flags ask for."""
    temperatures = options.temperature or [0.0, 0.7]
    return [
        SamplingParams(temperature=t, top_k=options.top_k, top_p=options.top_p, min_p=options.min_p)
        for t in temperatures
    ]


def run(options: argparse.Namespace) -> int:
    """Runs `dspark calibrate`."""
    from dspark.calibrate.prompts import calibration_sets, digest, render
    from dspark.calibrate.rollout import Plan
    from dspark.calibrate.run import calibrate_pair
    from dspark.plots import check_plot

    plan = Plan(tokens=options.tokens, samples=options.samples, seed=options.seed)
    params = regimes(options)
    sets = calibration_sets(options.prompts or [], options.target)
    output = _output(options)
    check_plot(options.plot)
    how = decoder_options(options)
    progress = Progress(silent=options.json)
    models = load_models(options, progress)
    target = expanded(options.target, "target").name
    fitted: list[Fitted] = []
    # Each prompt once, or one could be both fitted to and scored on.
    template = template_options(options)
    prompts = list(dict.fromkeys(render(models, sets, how.window(models), template)))
    digests = [digest(prompt) for prompt in prompts]
    ended: BaseException | None = None
    # Each fit is written at once: a later regime may fail, or be interrupted.
    try:
        for one in calibrate_pair(models, prompts, params, plan, options=how, progress=progress):
            progress.clear()
            fitted.append(one)
            write_calibrations(output, [entry_of(one, target, digests, template)])
            if not options.json:
                print_text(f"{one.name}: {_work(one)}\n{_scores_table(one)}\n{_left(one)}")
                print_text(f"written: {output}\n")
    except (Exception, KeyboardInterrupt) as error:
        ended = error
    progress.clear()
    if ended is not None and not fitted:
        raise ended
    if options.json:
        print_json(
            {
                "output": str(output),
                "template_options": template or None,
                "regimes": [one.to_json() for one in fitted],
                **({} if ended is None else {"error": named(ended)}),
            }
        )
    # After the numbers, which must not be lost if the plot cannot be drawn.
    if options.plot is not None:
        _plot(options.plot, fitted)
    return 0 if ended is None else end_with(ended, options.json)


def entry_of(
    fitted: Fitted, target: str, digests: Sequence[str], template: Mapping[str, Any] | None = None
) -> Entry:
    """The entry of calibration.json; `digests` are those of all prompts, `template` the keywords that they
    were rendered with."""
    before, after = fitted.before.overall.ece, fitted.after.overall.ece
    return Entry(
        regime=fitted.regime,
        block_size=len(fitted.temperatures),
        temperatures=tuple(fitted.temperatures),
        acceptance_by_position=tuple(fitted.acceptance),
        rounds=fitted.rounds,
        choosing_rounds=fitted.choosing_rounds,
        fitted_prompts=tuple(digests[p] for p in fitted.prompts),
        ece_before=None if before is None else round(before, 5),
        ece_after=None if after is None else round(after, 5),
        template_options=dict(template or {}),
        target=target,
        date=date.today().isoformat(),
        dspark=__version__,
    )


def _output(options: argparse.Namespace) -> Path:
    """Where to write, checked before the work is done rather than after it."""
    import dspark
    from dspark.cli.options import draft_of
    from dspark.pretrained import resolve

    draft = draft_of(options)
    if draft is None:
        raise ConfigError("confidences come from a draft: --no-draft leaves nothing to calibrate")
    given: Path | None = options.output
    if given is None:
        directory = resolve(draft, "draft").resolve()
        if directory.is_relative_to(Path(dspark.__file__).parent.resolve()):
            raise ConfigError(f"{directory} belongs to the installed package: name a file with --output")
        given = directory / FILE_NAME
    check_writable(given)
    return given


def _plot(path: Path, fitted: list[Fitted]) -> None:
    from dspark.calibrate.diagram import reliability_diagram
    from dspark.plots import save_plot

    panels = []
    for one in fitted:
        pairs = [("all positions", one.before.overall, one.after.overall)]
        for k, (before, after) in enumerate(zip(one.before.survival, one.after.survival, strict=True), 1):
            pairs.append((f"position {k}", before, after))
        for name, before, after in pairs:
            panels.append((f"T {one.regime.temperature:g}, {name}", [("before", before), ("after", after)]))
    save_plot(reliability_diagram(panels), path)


def _work(one: Fitted) -> str:
    """How many rounds the numbers are based on."""
    scored = f"scored on {one.held_out_rounds}" if one.held_out_rounds else "none left to score on"
    return f"fitted to {one.rounds} rounds, temperatures chosen by {one.choosing_rounds} others, {scored}"


def _left(one: Fitted) -> str:
    """What was not fitted."""
    if one.positions == len(one.temperatures):
        return ""
    return f"positions after {one.positions} were reached too rarely to be fitted, and keep T = 1\n"


def _scores_table(one: Fitted) -> str:
    rows: list[tuple[str, ...]] = [
        ("position", "T", "rounds", "accepted", "ECE", "after", "AUROC", "after", "Brier", "after")
    ]
    before, after = one.before, one.after
    lines = [("all", "", before.overall, after.overall)]
    for k, temperature in enumerate(one.temperatures):
        lines.append((str(k + 1), f"{temperature:.2f}", before.survival[k], after.survival[k]))
    for name, shown, b, a in lines:
        shares = (percent(b.happened), percent(b.ece), percent(a.ece))
        numbers = (number(b.auroc), number(a.auroc), number(b.brier), number(a.brier))
        rows.append((name, shown, str(b.count), *shares, *numbers))
    return table(rows)


def percent(value: float | None) -> str:
    """A share, for a table."""
    return "-" if value is None else f"{value:.1%}"


def number(value: float | None) -> str:
    """A number with three digits, for a table."""
    return "-" if value is None else f"{value:.3f}"
