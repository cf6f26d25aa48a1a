"""The sets that come with the package: one prompt a line, written for it."""

from __future__ import annotations

from pathlib import Path

from dspark.prompts.files import read_prompts

GENERAL = ("chat", "maths", "code")
"""For models that were taught to answer."""

CODE_BEGINNINGS = ("python",)
"""For targets that know program text alone."""

SETS = GENERAL + CODE_BEGINNINGS

CODE_ALONE = ("tiny",)
"""Targets that know program text and nothing else."""


def built_in(name: str) -> list[str]:
    """The prompts of a set."""
    return read_prompts(Path(__file__).parent / f"{name}.jsonl")
