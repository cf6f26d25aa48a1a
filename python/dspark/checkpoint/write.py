"""Writing safetensors files from pieces, so that no more than one piece is in memory."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dspark.checkpoint.header import StoredTensor
from dspark.errors import CheckpointError

BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "BOOL": 1}
PIECE = 1 << 24
"""Bytes that are copied at once."""


@dataclass(frozen=True)
class NewTensor:
    """A tensor to write: `dtype` is safetensors' name for it, `pieces` gives its bytes in order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[bytes]]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * BYTES[self.dtype]


def copy_of(name: str, stored: StoredTensor) -> NewTensor:
    """A tensor of another file under a new name, byte by byte."""

    def pieces() -> Iterable[bytes]:
        with stored.file.open("rb") as stream:
            stream.seek(stored.start)
            left = stored.stop - stored.start
            while left:
                piece = stream.read(min(left, PIECE))
                if not piece:
                    raise CheckpointError(f"{stored.file}: truncated within the tensor {stored.name}")
                left -= len(piece)
                yield piece

    return NewTensor(name, stored.dtype, stored.shape, pieces)


def write_safetensors(file: Path, tensors: Sequence[NewTensor]) -> None:
    """Writes one file: 8 bytes little-endian header length, a JSON header padded to 8 bytes, the data."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in tensors:
        stop = start + tensor.size
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            written = sum(stream.write(piece) for piece in tensor.pieces())
            if written != tensor.size:
                raise CheckpointError(
                    f"{file}: {tensor.name} has {written} bytes, expected {tensor.size} for {tensor.dtype} "
                    f"{list(tensor.shape)}"
                )
