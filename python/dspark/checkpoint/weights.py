"""The weights of a checkpoint directory: one safetensors file, or shards with an index."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from dspark.checkpoint.header import StoredTensor, read_header
from dspark.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")
OTHER_FORMATS = {".bin": "pickled", ".pt": "pickled", ".pth": "pickled", ".ckpt": "pickled", ".gguf": "GGUF"}


class WeightFiles:
    """Names, shapes and dtypes of all tensors; nothing else has been read."""

    def __init__(self, directory: Path, files: list[Path], tensors: dict[str, StoredTensor]) -> None:
        self.directory = directory
        self.files = files
        self.tensors = tensors

    @classmethod
    def open(cls, directory: Path) -> WeightFiles:
        """Reads the headers of the directory's safetensors files.

        Raises:
            CheckpointError: there are none, or only pickled or GGUF weights; a shard is missing; a file is
                damaged.
        """
        if (directory / SINGLE).exists():  # first, as in transformers: an index beside it may be stale
            return cls(directory, [directory / SINGLE], read_header(directory / SINGLE))
        if (directory / INDEX).exists():
            return cls._sharded(directory)
        if not directory.is_dir():
            raise CheckpointError(f"{directory}: no such directory")
        raise CheckpointError(f"{directory}: no {SINGLE} and no {INDEX} there{_instead(directory)}")

    @classmethod
    def _sharded(cls, directory: Path) -> WeightFiles:
        index = directory / INDEX
        try:
            places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            shards = sorted({directory / shard for shard in places.values()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{index}: not an index of safetensors shards ({error!r})") from error
        for shard in shards:
            if shard.parent != directory or not shard.name:
                raise CheckpointError(f"{index}: names the shard {shard}, which is not in the same directory")
        tensors: dict[str, StoredTensor] = {}
        for shard in shards:
            if not shard.exists():
                raise CheckpointError(f"{index}: names the shard {shard.name}, which is missing")
            tensors.update(read_header(shard))
        for name, shard in places.items():
            if name not in tensors or tensors[name].file != directory / shard:
                raise CheckpointError(f"{index}: says that {name} is in {shard}, but it is not there")
        return cls(directory, shards, tensors)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor, or None if there is no such tensor."""
        stored = self.tensors.get(name)
        return None if stored is None else stored.shape

    def where(self) -> str:
        """The file, or the directory of the shards, for messages."""
        return str(self.files[0] if len(self.files) == 1 else self.directory)

    def main_dtype(self, names: Iterable[str]) -> str:
        """safetensors' name of the floating dtype that holds most elements of `names`."""
        count = dict.fromkeys(FLOATS, 0)
        for name in names:
            stored = self.tensors.get(name)
            if stored is not None and stored.dtype in count:
                count[stored.dtype] += stored.elements
        return max(FLOATS, key=lambda dtype: count[dtype])

    def check(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """The tensor `name`, if it exists and has this shape and a floating dtype.

        Raises:
            CheckpointError: names the file, the tensor, what was expected and what was found.
        """
        stored = self.tensors.get(name)
        if stored is None:
            raise CheckpointError(f"{self.where()}: tensor {name} is missing; expected shape {list(shape)}")
        if stored.shape != shape:
            raise CheckpointError(
                f"{stored.file}: tensor {name} has the wrong shape, expected {list(shape)}, "
                f"found {list(stored.shape)}"
            )
        if stored.dtype not in FLOATS:
            raise CheckpointError(
                f"{stored.file}: tensor {name} has dtype {stored.dtype}, expected {', '.join(FLOATS)}; "
                "quantised weights are not supported"
            )
        return stored


def _instead(directory: Path) -> str:
    for file in sorted(directory.iterdir()):
        if (kind := OTHER_FORMATS.get(file.suffix)) is not None:
            return f"; {file.name} looks like {kind} weights, which are not supported"
    return ""
