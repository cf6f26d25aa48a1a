"""Files that commands write, checked before the work and never left half written; JSON for every parser."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dspark.errors import ConfigError


def check_writable(path: Path) -> None:
    """Raises `ConfigError` if the file cannot be written; call it before the work that fills it."""
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"{path} cannot be written: name a file in an existing directory")
    try:
        with tempfile.NamedTemporaryFile(prefix=f".{path.name}-", dir=path.parent):
            pass
        if path.exists():
            with path.open("ab"):
                pass
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error


def sync(path: Path) -> None:
    """Flushes a written file to disk before it is renamed or referred to: it then survives a loss of power.

    Raises `OSError`.
    """
    with path.open("r+b") as stream:  # Windows cannot sync a file that is open for reading only
        os.fsync(stream.fileno())


def read_lines(path: Path) -> list[str]:
    """The lines of a JSON Lines file, without line ends. Only "\\n" ends a line: JSON strings may contain the
    other characters at which `str.splitlines` splits, such as U+2028.

    Raises `OSError`, and `UnicodeDecodeError` for what is not UTF-8.
    """
    return path.read_bytes().decode("utf-8").split("\n")


def write_whole(path: Path, text: str) -> None:
    """Writes a file whole or not at all, readable by all; a loss of power leaves the old or the new one.

    Raises `OSError`.
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    scratch = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        scratch.chmod(0o644)  # mkstemp's own mode would hide it from other users
        sync(scratch)
        scratch.replace(path)
    except BaseException:
        with suppress(OSError):
            scratch.unlink()
        raise


def finite(value: Any) -> Any:
    """Replaces infinities (log probabilities of impossible tokens) and NaN, which JSON lacks, by `None`."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
