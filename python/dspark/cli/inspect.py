"""Prints what a checkpoint is, without loading its weights: packaging, sizes, heads, taps, warnings."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dspark.cli.show import fields, print_json, print_text
from dspark.errors import CheckpointError

HELP = "show what a checkpoint is"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `dspark inspect`."""
    parser.add_argument("path", metavar="PATH", help="a draft or a target: a directory or a known name")
    parser.add_argument("--target", metavar="DIR", help="show this target as well")


def run(options: argparse.Namespace) -> int:
    """Runs `dspark inspect`."""
    shown: dict[str, Any] = _inspect(options.path)
    if options.target is not None:
        shown = {"checkpoint": shown, "target": _inspect(options.target)}
    if options.json:
        print_json(shown)
    else:
        print_text(fields(shown))
    return 0


def _inspect(name: str) -> dict[str, Any]:
    from dspark.checkpoint.describe import inspect_checkpoint

    return inspect_checkpoint(_directory(name))


def _directory(name: str) -> Path:
    """The directory of a model of either kind."""
    from dspark.pretrained import resolve

    try:
        return resolve(name, "target")
    except CheckpointError as as_target:
        try:
            return resolve(name, "draft")
        except CheckpointError:
            raise as_target from None
