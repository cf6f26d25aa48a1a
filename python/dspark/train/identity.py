"""The target that states, answers and runs belong to is identified by its contents, not by its name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark.checkpoint.weights import WeightFiles
from dspark.errors import CheckpointError

TEXT = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
LATER = {"tokenizer_content", "end_token_ids", "sampling", "users"}
"""Keys that older records do not have: a key that is missing there counts as the same."""

SAMPLED, PLACES = 64, 4
"""Bytes read at each place, and places in each tensor: training changes nearly all of a matrix, so that there
is no need to read 50 GB of weights."""


def identity(target: Path) -> str:
    """A hash of a target's configuration, of its tensors' names, dtypes and shapes, and of a sample of each
    one's bytes; the same wherever the directory is, and however the tensors are spread over files.

    Raises:
        CheckpointError: it cannot be read.
    """
    found = hashlib.blake2b(digest_size=8)
    try:
        found.update((target / "config.json").read_bytes())
        for name, stored in sorted(WeightFiles.open(target).tensors.items()):
            found.update(repr((name, stored.dtype, stored.shape)).encode())
            with stored.file.open("rb") as stream:
                for place in range(PLACES):
                    at = (stored.stop - stored.start - SAMPLED) * place // (PLACES - 1)
                    stream.seek(stored.start + max(at, 0))
                    found.update(stream.read(min(SAMPLED, stored.stop - stored.start)))
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be read ({error})") from error
    return found.hexdigest()


def read_record(file: Path, of: str) -> dict[str, Any]:
    """The record of where a directory's files come from; `of`: what these are, for messages.

    Raises:
        CheckpointError: it is missing or damaged, so it is unknown where they come from.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"a {type(found).__name__}, expected an object")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{file}: cannot be read ({error}), so it is unknown what the {of} next to it belong to: put it "
            "back, empty the directory, or name another one"
        ) from error
    return found


def text_identity(target: Path) -> str:
    """A hash of what a target reads and writes text with: its tokenizer's files and its chat templates.

    Raises:
        CheckpointError: they cannot be read.
    """
    found = hashlib.blake2b(digest_size=8)
    more = sorted((target / "additional_chat_templates").glob("*.jinja"))
    try:
        for file in [*(target / name for name in TEXT), *more]:
            content = file.read_bytes() if file.is_file() else b""
            found.update(f"{file.name} {len(content)} ".encode() + content)
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be read ({error})") from error
    return found.hexdigest()


def named(target: str, content: str) -> dict[str, str]:
    """What records say about a target: its name for people, its `identity` for comparison."""
    return {"target": target, "target_content": content}


def differing(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """The keys in which two records differ. Targets are compared by content, and by name only if `found` has
    no content, as in older records."""
    keys = found.keys() | wanted.keys()
    keys -= {"target"} if "target_content" in found else {"target_content"}
    keys -= LATER - found.keys()
    return sorted(key for key in keys if found.get(key) != wanted.get(key))


def difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """The first difference between two records in words; None if they agree."""
    if not (odd := differing(found, wanted)):
        return None
    if odd[0] == "target_content":
        return f"the target {found['target']!r} with other contents than {wanted['target']!r} has now"
    if odd[0] == "tokenizer_content":
        return f"another tokenizer or chat template than {wanted['target']!r} has now"
    return f"{odd[0]} {found.get(odd[0])!r}, but {wanted.get(odd[0])!r} is asked for"
