"""The header of a safetensors file: what it holds, without reading any of it.

Format: 8 bytes little-endian header length, a JSON header, then the data that its offsets point into.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

from dspark.errors import CheckpointError

LONGEST_HEADER = 100_000_000
"""Bytes; the limit of the safetensors library."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor on disk: `start` and `stop` are byte positions in `file`, `dtype` is safetensors' name for
    it."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one file by name.

    Raises:
        CheckpointError: the file is missing, is not safetensors, or is shorter than its header says.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else LONGEST_HEADER + 1
            if length > min(LONGEST_HEADER, size - 8):
                raise CheckpointError(
                    f"{file}: not a whole safetensors file ({size} bytes, header cut short)"
                )
            header = json.loads(stream.read(length))
    except FileNotFoundError:
        raise CheckpointError(f"{file}: no such file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{file}: not a safetensors file ({error})") from error
    tensors = {}
    end = 8 + length
    try:
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            start, stop = (8 + length + offset for offset in entry["data_offsets"])
            tensors[name] = StoredTensor(name, file, entry["dtype"], tuple(entry["shape"]), start, stop)
            end = max(end, stop)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: its safetensors header is malformed ({error!r})") from error
    if end != size:
        raise CheckpointError(f"{file}: truncated or damaged, expected {end} bytes, found {size}")
    return tensors
