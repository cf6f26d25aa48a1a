"""Writes a draft in the packaging that another engine reads. The drafts stay the same to the last bit.

flat         DeepSpec: own embeddings and output head (from --target where the draft has none)
nested       SpecForge: switches under dflash_config
speculators  vLLM: transformer_layer_config, taps counted from the embeddings, reduced vocabularies
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dspark.cli.show import fields, print_json, print_text

HELP = "write a draft for another engine"
FORMATS = ("flat", "nested", "speculators")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `dspark export`."""
    parser.add_argument("draft", metavar="DRAFT", help="a directory or a known name")
    parser.add_argument("--format", required=True, choices=FORMATS, help="the packaging to write")
    parser.add_argument("--output", required=True, metavar="DIR", help="a directory that is new or empty")
    parser.add_argument("--target", metavar="DIR", help="the draft's target: a directory or a known name")


def run(options: argparse.Namespace) -> int:
    """Runs `dspark export`."""
    from dspark.checkpoint import inspect_checkpoint
    from dspark.draft.export import export_draft
    from dspark.pretrained import resolve

    source = resolve(options.draft, "draft")
    target = None if options.target is None else resolve(options.target, "target")
    output = Path(options.output)
    remarks = export_draft(source, output, options.format, target, options.target)
    shown = {"output": str(output), "format": options.format, "remarks": remarks}
    if options.json:
        print_json({**shown, "draft": inspect_checkpoint(output)})
    else:
        print_text(fields(shown))
    return 0
