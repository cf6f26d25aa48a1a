"""One run at a time in a directory."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dspark.errors import ConfigError
from dspark.train.report import Say

LOCK = "lock"


@contextmanager
def held(directory: Path, say: Say) -> Iterator[None]:
    """Locks the directory for this process until the context ends, or until the process dies, when the system
    frees the lock. Nothing is locked outside POSIX, nor (with a message) where the file system cannot lock.

    Raises:
        ConfigError: another run holds it.
    """
    if os.name != "posix":
        yield
        return
    import fcntl

    directory.mkdir(parents=True, exist_ok=True)
    with (directory / LOCK).open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise ConfigError(
                    f"{directory}: another run is at work there: wait for its end, or name another directory"
                ) from error
            say(f"{directory}: cannot be locked against a second run ({error})")
        yield
