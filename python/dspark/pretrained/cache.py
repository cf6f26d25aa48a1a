"""Where fetched models live, and how a directory gets there whole or not at all."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from dspark.errors import CheckpointError
from dspark.paths import expanded

Progress = Callable[[str], None]


log: Progress = logging.getLogger("dspark").info
"""The default: writes to the log, which the command line shows line by line."""


def cache_root() -> Path:
    """Where fetched models live: `$DSPARK_CACHE`, else `$XDG_CACHE_HOME/dspark`, else `~/.cache/dspark`.

    Raises `CheckpointError` if there is no home directory."""
    own = os.environ.get("DSPARK_CACHE")
    if own:
        return expanded(own, "DSPARK_CACHE")
    # The XDG rule: a relative path there is invalid and is ignored.
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if xdg.is_absolute():
        return xdg / "dspark"
    try:
        return Path.home() / ".cache" / "dspark"
    except RuntimeError as error:  # neither HOME nor an entry for this user
        raise CheckpointError(
            "there is no home directory for the cache: set DSPARK_CACHE to a directory"
        ) from error


def build_once(target: Path, is_complete: Callable[[Path], bool], build: Callable[[Path], None]) -> Path:
    """Return `target`, building it first unless `is_complete(target)`.

    `build` fills a temporary directory beside the target, which is then renamed: a reader never sees half a
    model, an interrupted build leaves nothing behind that looks like one, and of two concurrent builds the
    first to finish wins and the other's work is dropped.
    """
    if is_complete(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise CheckpointError(
            f"the model cache {target.parent} cannot be written ({error}): set DSPARK_CACHE to "
            "another directory"
        ) from error
    try:
        made = scratch / "new"
        made.mkdir()
        build(made)
        _put_in_place(made, target, is_complete, scratch / "old")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _put_in_place(made: Path, target: Path, is_complete: Callable[[Path], bool], attic: Path) -> None:
    try:
        made.rename(target)  # replaces an empty directory, fails on one with contents
    except OSError:
        if is_complete(target):
            return
        if target.exists():
            target.rename(attic)  # an older or damaged conversion
        made.rename(target)
