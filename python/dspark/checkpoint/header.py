"""The header of a safetensors file: what the file holds, without reading its data.

Format: 8 bytes little-endian header length, a JSON header, then the data that its offsets point into.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from dspark.errors import CheckpointError

LONGEST_HEADER = 100_000_000
"""Bytes; the limit of the safetensors library."""

BITS = {
    "F64": 64,
    "I64": 64,
    "U64": 64,
    "F32": 32,
    "I32": 32,
    "U32": 32,
    "F16": 16,
    "BF16": 16,
    "I16": 16,
    "U16": 16,
    "I8": 8,
    "U8": 8,
    "BOOL": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
}
"""Bits per element of the known dtypes; the size of other tensors is taken from their offsets alone."""


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
        CheckpointError: the file is missing, is not safetensors, or is shorter or longer than its header
            says; a tensor is listed twice, overlaps another, or has a size unlike its dtype and shape.
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
            header = json.loads(stream.read(length), object_pairs_hook=_without_doubles)
    except FileNotFoundError:
        raise CheckpointError(f"{file}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not a safetensors file ({error})") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: its safetensors header is malformed (not an object)")
    begin = 8 + length
    tensors = {
        name: _stored(file, name, entry, begin) for name, entry in header.items() if name != "__metadata__"
    }
    end = begin
    for stored in sorted(tensors.values(), key=lambda stored: (stored.start, stored.stop)):
        if stored.start != end:
            raise CheckpointError(
                f"{file}: damaged, tensor {stored.name} begins at byte {stored.start}, not {end}"
            )
        end = stored.stop
    if end != size:
        raise CheckpointError(f"{file}: truncated or damaged, expected {end} bytes, found {size}")
    return tensors


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _stored(file: Path, name: str, entry: Any, begin: int) -> StoredTensor:
    """One entry of a header whose data begins at byte `begin`."""
    values = [
        entry.get(key) if isinstance(entry, dict) else None for key in ("dtype", "shape", "data_offsets")
    ]
    dtype, shape, offsets = values
    if not (isinstance(dtype, str) and _is_counts(shape) and _is_counts(offsets) and len(offsets) == 2):
        raise CheckpointError(f"{file}: its safetensors header is malformed (entry of {name!r})")
    start, stop = offsets
    bits = BITS.get(dtype)
    if bits is not None and (stop - start) * 8 != math.prod(shape) * bits:
        raise CheckpointError(
            f"{file}: damaged, tensor {name} has {stop - start} bytes, but its dtype {dtype} and shape "
            f"{shape} need {math.prod(shape) * bits // 8}"
        )
    if start > stop:
        raise CheckpointError(f"{file}: damaged, tensor {name} ends before it begins")
    return StoredTensor(name, file, dtype, tuple(shape), begin + start, begin + stop)


def _is_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(entry) is int and 0 <= entry < 2**63 for entry in value)
