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
    """Raises `ConfigError` if standard output is closed; lets remarks go nowhere if standard error is.

    Python has `None` for a stream that was closed before it began, and prints to standard output what is
    meant for a standard error that is `None`.
    """
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - open as long as the process
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
        raise ConfigError("standard output is closed, and there is no other place for the result")


def standard_input() -> TextIO:
    """Standard input; raises `ConfigError` if it is closed."""
    if sys.stdin is None:
        raise ConfigError("standard input is closed, and the prompt is to be read from it")
    return sys.stdin


def read_input() -> str:
    """All of standard input; errors as in `input_lines`."""
    return "".join(input_lines())


def input_lines() -> Iterator[str]:
    """Standard input, line by line; `ConfigError` if it is closed, `RequestError` for what is no text."""
    with as_text():
        yield from standard_input()


@contextmanager
def as_text() -> Iterator[None]:
    """Raises `RequestError` for bytes of standard input that are not in its encoding."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is no {error.encoding} text: {error}") from error


def write(text: str) -> None:
    """To standard output at once: `BrokenPipeError` if nobody reads, `DSparkError` for any other fault."""
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
    """Writes to standard error; what it does not take is no reason to stop."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        discard(sys.stderr)


def discard(stream: TextIO) -> None:
    """Sends the rest of a stream nowhere: the interpreter flushes it once more when it ends."""
    with suppress(io.UnsupportedOperation):  # not a file, but something in its place
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
