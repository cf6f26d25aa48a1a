"""Files of prompts: JSON lines with a `prompt`, or with `turns`."""

from __future__ import annotations

import json
from pathlib import Path

from dspark.errors import RequestError
from dspark.files import read_lines


def read_prompts(path: Path) -> list[str]:
    """The prompts of a JSONL file: of each line its `prompt`, or the first of its `turns`; errors as in
    `read_turns`."""
    return [turns[0] for turns in read_turns(path)]


def read_turns(path: Path) -> list[tuple[str, ...]]:
    """The users' turns of a JSONL file: of each line its `prompt` alone, or its `turns`.

    Raises `RequestError` naming the line that has neither.
    """
    try:
        lines = read_lines(path)
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"the prompts in {path} cannot be read: {error}") from error
    prompts = [_turns(f"{path}, line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise RequestError(f"{path} holds no prompts")
    return prompts


def _turns(where: str, line: str) -> tuple[str, ...]:
    try:
        entry = json.loads(line, strict=False)  # texts may contain control characters
    except ValueError as error:
        raise RequestError(f"{where}: not JSON ({error})") from error
    turns = None
    if isinstance(entry, dict):
        turns = [entry["prompt"]] if "prompt" in entry else entry.get("turns")
    if not isinstance(turns, list) or not turns or not all(isinstance(one, str) and one for one in turns):
        raise RequestError(
            f'{where}: expected an object with a text "prompt", or with a list of texts "turns"'
        )
    for one in turns:
        try:
            one.encode("utf-8")
        except UnicodeEncodeError as error:  # half a character, as left by a cut in another encoding
            raise RequestError(f"{where}: not valid Unicode ({error})") from error
    return tuple(turns)
