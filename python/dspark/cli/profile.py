"""Measures what the passes of a pair cost on this machine, and stores it for the policy "throughput".

A decoder measures the same, less thoroughly, when it starts and finds nothing stored. Run this on an idle
machine. Without --refresh it shows what an earlier run measured.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.cli.options import add_model_options, decoder_options, load_models
from dspark.cli.show import Progress, print_json, print_text, say, table
from dspark.errors import ConfigError
from dspark.plots import check_plot

if TYPE_CHECKING:
    from dspark.serve.costs import Costs
    from dspark.serve.models import Models

HELP = "measure what passes cost on this machine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `dspark profile`."""
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the table as FILE.png or FILE.svg")
    parser.add_argument("--refresh", action="store_true", help="measure again, even if a result is stored")
    parser.add_argument(
        "--max-batch-size", type=int, default=32, metavar="N", help="requests at once, for the widest pass"
    )
    add_model_options(parser)


def run(options: argparse.Namespace) -> int:
    """Runs `dspark profile`."""
    check_plot(options.plot)
    if options.no_draft:
        raise ConfigError("costs only decide about drafting: --no-draft leaves nothing to profile")
    progress = Progress(silent=options.json)
    how = decoder_options(options)
    models = load_models(options, progress)

    from dspark.serve.costs import THOROUGH, kept, remeasure

    costs, path = (None, None) if options.refresh else kept(models, how)
    was_kept = costs is not None and costs.repeats >= THOROUGH.repeats
    if costs is None or not was_kept:
        progress("measuring", 0, 1)
        costs, path = remeasure(models, how, THOROUGH)
        progress.clear()
    if options.plot is not None:
        from dspark.serve.costs.plot import plot_costs

        plot_costs(costs, options.plot, f"{models.paths[0].name}, {models.info()['threads']} threads")
    if options.json:
        print_json(to_json(models, costs, path, was_kept))
    else:
        print_costs(models, costs)
        origin = "kept from an earlier run" if was_kept else f"measured in {costs.seconds:.1f} s"
        say(f"{origin}; {'the cache cannot be written' if path is None else path}")
    return 0


def to_json(models: Models, costs: Costs, path: Path | None, was_kept: bool) -> dict[str, Any]:
    """What `dspark profile --json` prints; times in seconds."""
    from dspark.serve.costs import device_name

    info = models.info()
    names = ("target", "draft", "dtype", "draft_dtype", "threads", "torch")
    return {
        **{name: info[name] for name in names},
        "device": device_name(models.target.device),
        "passes": [
            {
                "tokens": tokens,
                "requests": requests,
                "seconds": seconds,
                "tokens_per_second": tokens / seconds,
            }
            for tokens, requests, seconds in costs.passes
        ],
        "draft_passes": [{"requests": requests, "seconds": seconds} for requests, seconds in costs.draft],
        "chain_seconds_per_token": costs.token_seconds,
        "context": costs.context,
        "measured_s": costs.seconds,
        "kept": was_kept,
        "file": None if path is None else str(path),
    }


def print_costs(models: Models, costs: Costs) -> None:
    """The table in words and numbers."""
    from dspark.serve.costs import device_name

    info = models.info()
    print_text(f"target {info['target']}, {info['dtype']}\ndraft  {info['draft']}, {info['draft_dtype']}")
    print_text(
        f"{device_name(models.target.device)}, {info['threads']} threads, torch {info['torch']}, "
        f"{costs.context} positions cached per request\n"
    )
    rows = [("target pass", "requests", "ms", "tokens/s")]
    for tokens, requests, seconds in costs.passes:
        rows.append((f"{tokens} tokens", f"{requests}", f"{seconds * 1e3:.3f}", f"{tokens / seconds:.0f}"))
    print_text(table(rows) + "\n")
    rows = [("", "requests", "ms", "")]
    rows += [
        ("draft pass and context", f"{requests}", f"{seconds * 1e3:.3f}", "")
        for requests, seconds in costs.draft
    ]
    rows.append(("Markov chain, per drafted token", "", f"{costs.token_seconds * 1e3:.3f}", ""))
    print_text(table(rows))
