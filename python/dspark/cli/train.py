"""Trains a draft for a target: data, hidden states, training, checkpoints, in one directory that resumes.

  dspark train --target smollm2 --data chats/ --output run --vocabulary 8192 --layers 3
  dspark train --target smollm2 --prompts prompts.jsonl --output run
  torchrun --nproc-per-node 8 -m dspark.cli train ...

Every checkpoint writes the draft to OUTPUT/draft. Run the same command again to continue an interrupted run.
"""

from __future__ import annotations

import argparse
from typing import Any

from dspark.cli.options import add_template_options
from dspark.cli.show import fields, print_json, print_text, say
from dspark.cli.train_settings import settings_of
from dspark.errors import ConfigError

HELP = "train a draft"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `dspark train`."""
    parser.add_argument("--target", required=True, metavar="DIR", help="a directory or a known name")
    parser.add_argument("--output", required=True, metavar="DIR", help="the run's directory")
    parser.add_argument(
        "--start", metavar="DIR", help="start from this draft's weights (made for the same target)"
    )
    parser.add_argument(
        "--check", action="store_true", help="test OUTPUT/draft (or --start) before a long run; train nothing"
    )
    parser.add_argument(
        "--generate-only", action="store_true", help="check all settings, generate data, and stop"
    )
    _data(parser)
    _shape(parser)
    _objective(parser)
    _schedule(parser)
    _machine(parser)


def _data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data", "Conversations to train on; several sources add up.")
    add = group.add_argument
    add("--data", nargs="+", default=[], metavar="FILE", help="conversations: .jsonl, .safetensors, folders")
    add(
        "--prompts",
        metavar="FILE",
        help="for the target to answer: JSON lines with a prompt, or with turns (needs a chat template)",
    )
    add("--samples", type=int, metavar="N", help="answers to each prompt of --prompts (default: 1)")
    add("--self-prompts", type=int, default=0, metavar="N", help="number of prompts that the target makes up")
    add("--openers", metavar="FILE", help="beginnings for the made-up prompts, one per line")
    add("--generate-with", metavar="DRAFT", help="generate with this draft and record where it failed")
    add(
        "--temperature",
        type=float,
        nargs="+",
        default=[0.7],
        metavar="T",
        help="temperature of answers, or the lowest and the highest",
    )
    add("--top-p", type=float, metavar="P", help="top-p of answers")
    add("--top-k", type=int, metavar="K", help="top-k of answers")
    add_template_options(group)
    add("--max-tokens", type=int, default=256, metavar="N", help="maximum tokens of an answer")
    add("--batch-size", type=int, default=32, metavar="N", help="answers generated at once")
    add(
        "--max-length",
        type=int,
        default=1024,
        metavar="N",
        help="maximum tokens of a conversation (never more than the target's window)",
    )
    add(
        "--held-out",
        type=float,
        default=0.05,
        metavar="SHARE",
        help="share of the prompts kept for evaluation",
    )
    add("--cache", metavar="DIR", help="keep the target's hidden states here (default: compute on the fly)")
    add("--cache-limit", type=float, metavar="GB", help="refuse a larger cache (default: 4)")


def _shape(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "draft",
        "The shape of a new draft; what is not given follows the target. With --start, only "
        "--training-block-size may be given.",
    )
    add = group.add_argument
    add("--layers", type=int, metavar="N", help="draft layers (5)")
    add("--start-layers", type=int, nargs="+", metavar="L", help="start as copies of these target layers")
    add("--taps", type=int, nargs="+", metavar="L", help="target layers to read (-1: embeddings)")
    add("--block-size", type=int, metavar="N", help="tokens drafted per block (7)")
    add("--training-block-size", type=int, metavar="N", help="block width in training (default: block size)")
    add("--markov-head", metavar="KIND", help="vanilla (the default), gated, rnn or none")
    add("--markov-rank", type=int, metavar="R", help="rank of the Markov head (256)")
    add("--no-confidence", action="store_true", default=None, help="no confidence head")
    add("--vocabulary", type=int, metavar="N", help="draft only the N most frequent tokens")
    add("--mask-token-id", type=int, metavar="ID", help="default: a special token that no text uses")
    add("--intermediate-size", type=int, metavar="N")
    add("--num-attention-heads", type=int, metavar="N")
    add("--num-key-value-heads", type=int, metavar="N")
    add("--head-dim", type=int, metavar="N")
    add("--packaging", metavar="FORM", help="flat, nested or speculators")
    add("--save-dtype", default="bfloat16", help="bfloat16, float16 or float32")
    add("--lean", action="store_true", help="do not store the head (not with flat): dspark uses the target's")


def _objective(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("objective")
    add = group.add_argument
    add("--ce", type=float, default=0.1, metavar="A", help="factor of the cross-entropy")
    add("--tv", type=float, default=0.9, metavar="A", help="factor of the L1 distance")
    add("--confidence", type=float, metavar="A", help="factor of the confidence loss (default: 1)")
    add("--decay", type=float, default=4.0, metavar="G", help="weight of slot k is exp(-k / G); 0: all equal")
    add("--dpace", action="store_true", help="weight slots by the chance of reaching them instead")
    add("--early-ce", type=float, metavar="A", help="factor of the cross-entropy in the first steps")
    add("--early-share", type=float, metavar="SHARE", help="share of steps with --early-ce (default: 0.25)")
    add("--detach-confidence", action="store_true", help="keep the confidence loss out of the backbone")
    add("--anchors", type=int, default=512, metavar="N", help="blocks per sequence")
    add(
        "--failed-anchors",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="share of the blocks put where verify passes failed",
    )
    add("--context-noise", type=float, default=0.0, metavar="S", help="uniform noise on the taps")


def _schedule(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("schedule")
    add = group.add_argument
    add("--steps", type=int, default=1000, metavar="N", help="steps of the whole run")
    add("--sequences", type=int, default=4, metavar="N", help="sequences per step, over all processes")
    add("--micro-batch", type=int, default=4, metavar="N", help="sequences per pass; gradients accumulate")
    add("--learning-rate", type=float, default=6e-4, metavar="R", help="peak rate, which a cosine takes to 0")
    add("--warmup", type=float, default=0.04, metavar="SHARE", help="share of the steps until the peak rate")
    add("--cooldown", type=float, metavar="SHARE", help="last share of the steps; at the peak until then")
    add("--weight-decay", type=float, default=0.0, metavar="W")
    add("--clip", type=float, default=1.0, metavar="N", help="maximum norm of the gradient; 0: off")
    add("--muon", action="store_true", help="Muon for the backbone's matrices")
    add("--muon-factor", type=float, metavar="F", help="Muon's rate relative to AdamW's (default: 1)")
    add("--evaluate-every", type=int, default=500, metavar="N", help="steps between evaluations")
    add("--report-every", type=int, default=20, metavar="N", help="steps between reports")
    add("--held-out-sequences", type=int, default=32, metavar="N", help="number to evaluate on; 0: none")
    add("--checkpoint-minutes", type=float, default=10.0, metavar="M", help="minutes between checkpoints")
    add("--stop-after", type=float, metavar="HOURS", help="stop after this many hours; run again to resume")
    add("--seed", type=int, default=0, metavar="S")
    add("--accept-changes", action="store_true", help="resume although settings or data have changed")
    add("--tensorboard", action="store_true", help="write scalars (needs tensorboard, the extra `train`)")


def _machine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("machine")
    add = group.add_argument
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--dtype", default="auto", help="dtype of the target")
    add("--bf16", action="store_true", help="autocast the draft to bfloat16")
    add("--attention", metavar="KIND", help="how the training pass attends: products, sdpa or flex")
    add("--parallel", default="ddp", help="under torchrun: ddp or fsdp")
    add("--threads", type=int, metavar="N", help="number of torch threads")


def run(options: argparse.Namespace) -> int:
    """Runs `dspark train`."""
    import torch

    from dspark.cpus import warn_of_idle_threads

    if options.threads is not None:
        if options.threads < 1:
            raise ConfigError(f"--threads is {options.threads}; expected at least 1")
        torch.set_num_threads(options.threads)
    warn_of_idle_threads(torch.get_num_threads())
    from dspark.train.check import check
    from dspark.train.prepare import generate_only
    from dspark.train.run import train
    from dspark.train.world import is_main_process

    settings = settings_of(options)
    if options.check and not is_main_process():
        return 0  # under torchrun one process checks
    if options.check:
        found = check(settings, say)
    elif options.generate_only:
        found = {"generated": [str(path) for path in generate_only(settings, say)]}
    else:
        found = train(settings, say)
    if is_main_process():
        (print_json if options.json else _print)(found)
    return 0 if found.get("passed", True) else 1


def _print(value: dict[str, Any]) -> None:
    print_text(fields(value))
