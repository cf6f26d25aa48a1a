"""The three standard streams, any of which may be closed, full or broken."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from dspark.errors import ConfigError, DSparkError, RequestError


def prepare_output() -> None:
    """Raises `ConfigError` if standard output is closed; discards remarks if standard error is.

    Python has `None` for a stream that was closed before it started, and prints what is meant for a standard
    error that is `None` to standard output.
    """
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - open as long as the process
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
        raise ConfigError("standard output is closed, so there is nowhere to write the result")


def standard_input() -> TextIO:
    """Standard input; raises `ConfigError` if it is closed."""
    if sys.stdin is None:
        raise ConfigError("standard input is closed, but the prompt has to be read from it")
    return sys.stdin


def read_input() -> str:
    """All of standard input; errors as in `input_lines`."""
    return "".join(input_lines())


def input_lines() -> Iterator[str]:
    """Standard input, line by line; `ConfigError` if it is closed, `RequestError` if it is not text."""
    with as_text():
        yield from standard_input()


@contextmanager
def as_text() -> Iterator[None]:
    """Raises `RequestError` for bytes of standard input that are not in its encoding."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is not {error.encoding} text: {error}") from error


def write(text: str) -> None:
    """Writes to standard output at once: `BrokenPipeError` if nobody reads, else `DSparkError` on a fault."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        discard(sys.stdout)
        raise
    except OSError as error:
        discard(sys.stdout)
        raise DSparkError(f"standard output cannot be written: {error.strerror or error}") from error


def remark(text: str) -> None:
    """Writes to standard error; failing to do so is no reason to stop."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        discard(sys.stderr)


def discard(stream: TextIO) -> None:
    """Redirects a stream to the null device, because the interpreter flushes it once more when it ends."""
    with suppress(io.UnsupportedOperation):  # not a file, but an object in its place
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
