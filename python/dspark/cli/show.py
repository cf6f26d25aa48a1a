"""Shows things: JSON and text on standard output, remarks on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from dspark.cli import streams
from dspark.errors import DSparkError
from dspark.files import finite

if TYPE_CHECKING:
    from dspark.result import GenerationResult, StreamPiece


def say(remark: str) -> None:
    """One line on standard error, in place of a growing one."""
    if Progress.growing is not None:
        Progress.growing.clear()
    streams.remark(f"dspark: {remark}\n")


class Progress:
    """A line on standard error that a terminal shows growing. If it is not a terminal, only the steps' names
    are printed, or nothing if `silent`. `clear` removes a terminal's line, whatever is printed after it."""

    growing: ClassVar[Progress | None] = None
    """The one whose line stands on the terminal."""

    def __init__(self, *, silent: bool = False) -> None:
        self._silent = silent
        self._step = ""
        self._is_terminal = sys.stderr.isatty()
        self._width = 0

    def __call__(self, step: str, done: int, total: int) -> None:
        """Shows that `done` of `total` parts of a step are done."""
        if not self._is_terminal:
            if step != self._step and not self._silent:
                say(step)
        else:
            share = f" {done / total:4.0%}" if total > 1 else ""
            self._show(f"dspark: {step}{share}")
        self._step = step

    def loading(self, done: int, total: int) -> None:
        """Shows how many bytes of a checkpoint are loaded."""
        self("loading", done, total)

    def clear(self) -> None:
        """Removes the line."""
        if self._width:
            self._show("")
            self._width = 0
            Progress.growing = None

    def _show(self, line: str) -> None:
        streams.remark(f"\r{line.ljust(self._width)}\r{line}")
        self._width = len(line)
        Progress.growing = self


def print_json(value: Any) -> None:
    """One JSON value on a line of its own, ASCII only so that no locale can break it."""
    streams.write(json.dumps(finite(value), allow_nan=False) + "\n")


def print_stream(pieces: Iterable[StreamPiece], shown: list[str] | None = None) -> GenerationResult:
    """Writes a stream as it comes and returns its result; what was written is added to `shown`."""
    shown = [] if shown is None else shown
    try:
        for piece in pieces:
            write_text(piece.text)
            shown.append(piece.text)
            if piece.result is not None:
                return piece.result
    finally:
        if shown:
            write_text("\n")
    raise DSparkError("the stream ended without a result")


def write_text(text: str) -> None:
    """Text on standard output at once; what its encoding lacks becomes a question mark."""
    encoding = sys.stdout.encoding or "utf-8"
    streams.write(text.encode(encoding, "replace").decode(encoding))


def print_text(text: str) -> None:
    """Text on standard output with a line end."""
    write_text(text + "\n")


def summary(result: GenerationResult) -> str:
    """One line on how a request went."""
    tokens, seconds = len(result.token_ids), result.timing.total_s
    parts = [f"{tokens} tokens in {seconds:.2f} s"]
    if tokens and seconds > 0:
        parts[0] += f" ({tokens / seconds:.1f}/s)"
    if result.acceptance_length is not None:
        parts.append(f"acceptance length {result.acceptance_length:.2f} over {len(result.rounds)} rounds")
    if result.speculation != "on":
        parts.append(f"speculation: {result.speculation}")
    parts.append(f"finish reason {result.finish_reason}")
    parts.append(f"seed {result.seed}")
    return ", ".join(parts)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns of text, the first flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def fields(value: Mapping[str, Any], indent: str = "") -> str:
    """A mapping as indented `key: value` lines; values that do not fit into a line go below their key."""
    lines = []
    for key, item in value.items():
        line = f"{indent}{key}: {_scalar(item)}"
        if isinstance(item, Mapping) and (
            len(line) > _WIDTH or any(isinstance(i, Mapping) for i in item.values())
        ):
            lines += [f"{indent}{key}:", fields(item, indent + "  ")]
        elif isinstance(item, list | tuple) and any(isinstance(entry, str | Mapping) for entry in item):
            lines += [f"{indent}{key}:", *(f"{indent}  - {_scalar(entry)}" for entry in item)]
        else:
            lines.append(line)
    return "\n".join(lines)


_WIDTH = 100


def _scalar(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return ", ".join(str(entry) for entry in value) or "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_scalar(item)}" for key, item in value.items()) or "-"
    return str(value)
