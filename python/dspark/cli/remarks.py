"""The library's log as the command line shows it: one line per record, like errors."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from dspark.cli.show import say


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        text, error = record.getMessage(), str(record.exc_info[1] if record.exc_info else "")
        say(" ".join((text if error in text else f"{text}: {error}").split()))


@contextmanager
def one_line_each() -> Iterator[None]:
    """Shows what `dspark` logs meanwhile, without tracebacks unless DSPARK_TRACEBACK is set."""
    if os.environ.get("DSPARK_TRACEBACK"):
        yield
        return
    logger, handler = logging.getLogger("dspark"), _Lines()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)  # what is downloaded, and its progress
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
