"""What a run says: a line now and then, a log of JSON lines, TensorBoard scalars where it is installed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dspark.errors import ConfigError
from dspark.files import write_whole

LOG = "log.jsonl"
Say = Callable[[str], None]


class Log:
    """`log.jsonl` in the run's directory: one object for each report, with its step. A resumed run forgets
    what was reported after the step that it goes on from."""

    def __init__(self, directory: Path, step: int, tensorboard: bool) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file = directory / LOG
        kept = [line for line in self._lines() if json.loads(line)["step"] <= step]
        write_whole(self._file, "".join(line + "\n" for line in kept))
        self._board = _board(directory / "tensorboard", step) if tensorboard else None

    def _lines(self) -> list[str]:
        if not self._file.exists():
            return []
        lines = self._file.read_text(encoding="utf-8").splitlines()
        return [line for line in lines if line.endswith("}")]  # a kill may have cut the last

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """One report, with null for what is not finite; nested mappings and lists become scalars named by
        their path in TensorBoard."""
        values = _finite(values)
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"step": step, **values}, allow_nan=False) + "\n")
        if self._board is not None:
            for name, value in _scalars("", values):
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Flushes TensorBoard's file."""
        if self._board is not None:
            self._board.close()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
        raise ConfigError("TensorBoard is not installed: pip install 'dspark[train]'") from error
    return SummaryWriter(directory, purge_step=step + 1)
