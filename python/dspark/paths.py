"""Paths as users write them: `~` is a home directory, and any path may turn out to be inaccessible."""

from __future__ import annotations

import stat
from os import PathLike
from pathlib import Path

from dspark.errors import CheckpointError, shown


def expanded(path: str | PathLike[str], what: str) -> Path:
    """The path with `~` or `~name` in front replaced by that home directory.

    Raises `CheckpointError` if there is none; its message begins with `what`, the role of the path."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise CheckpointError(f"{what} is {str(path)!r}, but there is no such home directory") from error


def is_directory(path: Path) -> bool:
    """Whether a directory is there; raises `CheckpointError` if the system does not allow access."""
    return stat.S_ISDIR(_mode(path))


def is_file(path: Path) -> bool:
    """Whether a file is there; raises `CheckpointError` if the system does not allow access."""
    return stat.S_ISREG(_mode(path))


def _mode(path: Path) -> int:
    # Not pathlib's `is_dir`: which errors it raises and which mean "no" differs between Python versions.
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a null character
        return 0
    except OSError as error:  # no permission on the way to it, a name that is too long
        why = error.strerror or error
        raise CheckpointError(f"{shown(str(path))} cannot be accessed: {why}") from error
