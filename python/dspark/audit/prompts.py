"""What an audit runs on where nothing is given, and how files of prompts are read."""

from __future__ import annotations

import json
from pathlib import Path

from dspark.errors import RequestError
from dspark.files import read_lines

CODE = (
    "def mean(values):\n    ",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "import json\nimport os\n\n\ndef load(path):\n",
    "    for name, value in sorted(",
    "        if not isinstance(",
    '    """Return True if ',
    "try:\n    import",
    "        self._lock = ",
)
"""For models of program text: beginnings of the kind of code that most files hold."""

GENERAL = (
    "The harbour was quiet that morning. Two men were mending a net, and",
    "To make bread you need four things: flour, water, salt and",
    "Question: A train leaves at 9:40 and arrives at 11:25. How long does the journey take?\nAnswer:",
    "Write a short letter to a neighbour who has looked after your plants.\n\nDear",
    "def is_prime(n):\n    if n < 2:\n        return False\n",
    "1, 1, 2, 3, 5, 8, 13,",
    "Why is the sky dark at night? The simplest answer is that",
    "Liste der Planeten, von innen nach außen: Merkur, Venus,",
)
"""For general models: prose, a recipe, sums, a letter, code, another language."""


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
        entry = json.loads(line, strict=False)  # control characters may stand in texts
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
        except UnicodeEncodeError as error:  # half of a character, as a cut in another encoding leaves it
            raise RequestError(f"{where}: not valid Unicode ({error})") from error
    return tuple(turns)
