"""What a run reports: a line now and then, a log of JSON lines, and TensorBoard scalars on request."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dspark.errors import ConfigError
from dspark.files import finite, write_whole

LOG = "log.jsonl"
Say = Callable[[str], None]


class Log:
    """`log.jsonl` in the run's directory: one object for each report, with its step. A resumed run drops the
    reports of later steps than the one that it resumes from."""

    def __init__(self, directory: Path, step: int, tensorboard: bool) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file = directory / LOG
        kept = [one for one in reports(directory) if one["step"] <= step]
        write_whole(self._file, "".join(json.dumps(one) + "\n" for one in kept))
        self._board = _board(directory / "tensorboard", step) if tensorboard else None

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes one report, with null for numbers that are not finite; in TensorBoard, nested mappings and
        lists become scalars named by their path."""
        values = finite(values)
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"step": step, **values}, allow_nan=False) + "\n")
        if self._board is not None:
            for name, value in _scalars("", values):
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Flushes TensorBoard's file."""
        if self._board is not None:
            self._board.close()


def reports(directory: Path) -> list[dict[str, Any]]:
    """The reports in `log.jsonl` of a run's directory. Lines that a kill cut short are skipped."""
    file, found = directory / LOG, []
    if file.exists():
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                one = json.loads(line)
            except ValueError:
                continue
            if isinstance(one, dict) and isinstance(one.get("step"), int):
                found.append(one)
    return found


def _scalars(path: str, value: Any) -> list[tuple[str, float]]:
    if isinstance(value, Mapping):
        return [found for key, item in value.items() for found in _scalars(f"{path}/{key}", item)]
    if isinstance(value, list):
        return [found for i, item in enumerate(value) for found in _scalars(f"{path}/{i}", item)]
    return [(path.removeprefix("/"), float(value))] if isinstance(value, int | float) else []


def _board(directory: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError("TensorBoard is not installed: pip install tensorboard") from error
    return SummaryWriter(directory, purge_step=step + 1)
