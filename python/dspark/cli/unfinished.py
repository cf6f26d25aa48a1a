"""An error behind numbers that took long to get: they are shown all the same, and the command ends so."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from dspark.cli.show import say

T = TypeVar("T")


def kept(results: Iterable[T]) -> tuple[list[T], BaseException | None]:
    """The results of a measurement, and the error or Ctrl-C that ended it early, if one did."""
    found: list[T] = []
    try:
        for result in results:
            found.append(result)  # a list made at once would be lost
    except (Exception, KeyboardInterrupt) as error:
        return found, error
    return found, None


def named(error: BaseException) -> dict[str, str]:
    """What `--json` says of it, beside the numbers."""
    message = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
    kind = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else type(error)
    return {"type": kind.__name__, "message": message}


def end_with(error: BaseException, as_json: bool) -> int:
    """The exit code after what there is was printed; with `--json` that names the error already."""
    from dspark.cli.main import ERROR

    if isinstance(error, KeyboardInterrupt) or not as_json:
        raise error
    say("{type}: {message}".format(**named(error)))
    return ERROR
