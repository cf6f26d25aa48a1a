"""Tests whether a pair is lossless on this machine, and says how strong the test is.

At temperature 0, every token is compared with a plain forward pass over the whole text before it, without
a cache and without rounds. At higher temperatures, the tokens are tested against the distributions of such
passes. Exit codes: 0 pass, 1 fail, 2 error, 3 inconclusive (nothing drafted, nothing accepted, or too few
tokens to test).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.cli.options import (
    add_pair_options,
    add_template_options,
    decoder_options,
    load_models,
    template_options,
)
from dspark.cli.show import Progress, print_json, print_text, table

if TYPE_CHECKING:
    from dspark.audit.checks import Counts, GreedyCheck, SampledCheck
    from dspark.audit.report import Report
    from dspark.decoder import Prompt
    from dspark.serve.models import Models

HELP = "test whether a pair is lossless on this machine"

EXIT_CODES = {"pass": 0, "fail": 1, "inconclusive": 3}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `dspark audit`."""
    work = parser.add_argument_group("work")
    work.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE.jsonl",
        help='lines with "prompt" or "turns" (default: built in)',
    )
    work.add_argument(
        "--chat", action="store_true", help="prompts are a user's messages: apply the chat template"
    )
    add_template_options(work)
    work.add_argument("--tokens", type=int, default=64, metavar="N", help="tokens per sequence")
    work.add_argument(
        "--samples",
        type=int,
        metavar="N",
        help="sequences per prompt above temperature 0 (default: 16 with the embedded target, else 4)",
    )
    work.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the first prompt")
    add_pair_options(parser)
    parser.set_defaults(policy="fixed")  # even if drafting does not pay: without drafts nothing is proved


def run(options: argparse.Namespace) -> int:
    """Runs `dspark audit`."""
    from dspark.audit.prompts import CODE, GENERAL
    from dspark.audit.run import audit_pair
    from dspark.calibrate.rollout import Plan
    from dspark.prompts import CODE_ALONE, read_prompts

    # The embedded target is fast, and knows only program text.
    usual_samples, built_in = (16, CODE) if options.target in CODE_ALONE else (4, GENERAL)
    samples = usual_samples if options.samples is None else options.samples
    plan = Plan(tokens=options.tokens, samples=samples, seed=options.seed)
    template = template_options(options)
    texts = list(built_in) if options.prompts is None else read_prompts(options.prompts)
    progress = Progress(silent=options.json)
    models = load_models(options, progress)
    prompts = _prompts(texts, models, template, chat=options.chat)
    report = audit_pair(models, decoder_options(options), prompts, plan, progress)
    progress.clear()
    if options.json:
        print_json(report.to_json())
    else:
        print_report(report, len(prompts))
    return EXIT_CODES[report.verdict]


def _prompts(texts: list[str], models: Models, template: dict[str, Any], *, chat: bool) -> list[Prompt]:
    if not chat:
        return list(texts)
    tokenizer = models.require_tokenizer().with_template_options(template)
    return [tokenizer.render_chat([{"role": "user", "content": text}]) for text in texts]


def print_report(report: Report, prompts: int) -> None:
    """The report in words and numbers."""
    info = report.info
    print_text(f"target {info['target']}\ndraft  {info['draft'] or '-'}")
    print_text(
        f"{info['dtype']} on {info['device']}, {info['threads']} threads, acceptance {info['acceptance']}, "
        f"policy {info['policy']}, {prompts} prompts\n"
    )
    _print_greedy(report.greedy)
    for check in report.sampled:
        _print_sampled(check)
    _print_list("shown", report.shown())
    _print_list("not shown", report.not_shown())
    _print_list("failures", report.failures())
    _print_list("inconclusive", report.gaps())
    print_text(report.verdict.upper())


def _print_greedy(check: GreedyCheck) -> None:
    equal, beyond = check.counts.tokens - len(check.differences), check.beyond_rounding
    print_text(f"temperature 0: {_work(check.counts)}")
    print_text(
        f"  {equal} tokens equal the reference's, {len(check.differences) - beyond} differ within rounding, "
        f"{beyond} beyond it\n"
        f"  rounding explains gaps up to {check.largest_bound:.2g}; the two closest candidates are "
        f"{check.smallest_gap:.2g} apart, and {check.undecided} tokens are too close to call\n"
    )


def _print_sampled(check: SampledCheck) -> None:
    print_text(f"{check.name}: {_work(check.counts)}")
    rows = [("", "n", "value", "p", "would fail at")]
    for test in check.tests:
        numbers = (f"{test.count}", f"{test.statistic:.4f}", f"{test.p_value:.2g}", f"{test.detectable:.4f}")
        rows.append((f"  {test.name}", *numbers))
    print_text(table(rows) + "\n")


def _work(counts: Counts) -> str:
    text = f"{counts.tokens} tokens in {counts.sequences} sequences"
    if counts.drafted == 0:
        return f"{text}, nothing drafted"
    share = counts.accepted / counts.drafted
    return f"{text}, {counts.accepted} of {counts.drafted} drafted tokens accepted ({share:.0%})"


def _print_list(title: str, lines: list[str]) -> None:
    if lines:
        print_text("\n".join([f"{title}:", *(f"  - {line}" for line in lines)]) + "\n")
