"""The prompts to ask: the user's own or those that are shipped, rendered for the target."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.errors import CapacityError, RequestError
from dspark.prompts import CODE_ALONE, CODE_BEGINNINGS, GENERAL, built_in, read_prompts

if TYPE_CHECKING:
    from dspark.serve.models import Models

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
    """Texts by the name of their data set: those of the files if any are given, else the shipped ones.

    Raises `RequestError` naming the line of a file that is no prompt.
    """
    if not files:
        names = CODE_BEGINNINGS if target in CODE_ALONE else GENERAL
        return {name: built_in(name) for name in names}
    stems = [file.stem for file in files]
    return {
        stem if stems.count(stem) == 1 else str(file): read_prompts(file)
        for stem, file in zip(stems, files, strict=True)
    }


def calibration_sets(files: list[Path], target: str) -> dict[str, list[str]]:
    """The same, with program text from Python's own library added for targets that know nothing else: their
    answers have too few rounds in which a whole block is accepted."""
    more = {"library": standard_library()} if not files and target in CODE_ALONE else {}
    return data_sets(files, target) | more


def standard_library() -> list[str]:
    """A few lines from each of many places in Python's own modules: program text that every machine has, if
    not the same in every version."""
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


def render(
    models: Models,
    sets: Mapping[str, Sequence[str]],
    window: int,
    template: Mapping[str, Any] | None = None,
) -> list[tuple[int, ...]]:
    """The token ids of all prompts, set after set: a user's message where the target has a chat template,
    which is given the keywords in `template`, else the text as it is.

    Errors in prompts are raised before anything is run, and name the data set and the place in it:
    `RequestError`, or `CapacityError` if `window` positions leave no room for an answer. `RequestError` also
    for keywords without a template.
    """
    tokenizer = models.require_tokenizer().with_template_options(template or {})
    rendered = []
    for name, texts in sets.items():
        for number, text in enumerate(texts, 1):
            where = f"data set {name}, prompt {number}"
            try:
                tokens = models.tokens(tokenizer.encode_prompt(text))
            except RequestError as error:
                raise RequestError(f"{where}: {error}") from error
            if len(tokens) >= window:
                raise CapacityError(
                    f"{where} has {len(tokens)} tokens, which leaves no room for an answer in the context "
                    f"window of {window}"
                )
            rendered.append(tokens)
    return rendered


def digest(prompt: Sequence[int]) -> str:
    """A prompt's name in calibration.json, from its token ids: 32 bits tell those of a file apart."""
    return hashlib.sha256(",".join(map(str, prompt)).encode()).hexdigest()[:8]
