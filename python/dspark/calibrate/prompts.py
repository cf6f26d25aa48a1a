"""What is asked where the user names no prompts."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from dspark.audit.prompts import GENERAL, read_prompts
from dspark.errors import RequestError

SHIPPED = Path(__file__).parents[1] / "bench" / "prompts"
"""Prompts of the package by data set, a file of `turns` for each."""

CODE_ALONE = ("tiny",)
"""Targets that know program text and nothing else."""

_MODULES = [
    "argparse",
    "ast",
    "bdb",
    "calendar",
    "configparser",
    "csv",
    "dataclasses",
    "difflib",
    "fractions",
]
_MODULES += ["gzip", "heapq", "inspect", "mailbox", "pprint", "queue", "shutil", "statistics", "tarfile"]
_MODULES += ["textwrap", "zipapp"]
_SPOTS, _LINES = 8, 8


def data_sets(files: list[Path], target: str) -> dict[str, list[str]]:
    """Texts by the name of their data set: the files' own where some are given, else what is shipped.

    Raises `RequestError` naming the line of a file that is no prompt.
    """
    if not files and target in CODE_ALONE:
        return {"code": standard_library()}
    if not files:
        files = sorted(SHIPPED.glob("*.jsonl"))
    if not files:
        return {"general": list(GENERAL)}
    names = [file.stem for file in files]
    return {
        name if names.count(name) == 1 else str(file): read_prompts(file)
        for name, file in zip(names, files, strict=True)
    }


def standard_library() -> list[str]:
    """A few lines from each of many places of Python's own modules: program text that is on every machine,
    if not the same in every version."""
    folder = Path(sysconfig.get_path("stdlib"))
    prompts = []
    for module in _MODULES:
        try:
            lines = (folder / f"{module}.py").read_text(encoding="utf-8").splitlines(keepends=True)
        except OSError:  # moved or gone in this version
            continue
        step = max(len(lines) // _SPOTS, _LINES)
        prompts += ["".join(lines[start : start + _LINES]) for start in range(0, step * _SPOTS, step)]
    prompts = [prompt for prompt in prompts if prompt.strip()]
    if not prompts:
        raise RequestError(f"{folder} holds no modules to take prompts from: name a file with --prompts")
    return prompts
