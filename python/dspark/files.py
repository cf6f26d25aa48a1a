"""Files that commands write, refused before the work and never left half written; JSON that all can read."""

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
    """Raises `ConfigError` if no file can be there; best before the work whose outcome it is to hold."""
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"{path} cannot be written: name a file in a directory that is there")
    try:
        with tempfile.NamedTemporaryFile(prefix=f".{path.name}-", dir=path.parent):
            pass
        if path.exists():
            with path.open("ab"):
                pass
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error


def sync(path: Path) -> None:
    """Puts a written file on the disk before another name speaks of it: a loss of power leaves it whole.

    Raises `OSError`.
    """
    with path.open("r+b") as stream:  # Windows syncs nothing that is open for reading alone
        os.fsync(stream.fileno())


def read_lines(path: Path) -> list[str]:
    """The lines of a file of JSON lines, without their ends. "\\n" alone ends one: JSON strings may hold the
    other characters that `str.splitlines` cuts at, U+2028 for one.

    Raises `OSError`, and `UnicodeDecodeError` for what is not UTF-8.
    """
    return path.read_bytes().decode("utf-8").split("\n")


def write_whole(path: Path, text: str) -> None:
    """Writes a file whole or not at all, readable for everybody; a loss of power leaves it old or new.

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
    """JSON has no infinity (a log probability of a token that cannot come) and no NaN: both become `None`."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
