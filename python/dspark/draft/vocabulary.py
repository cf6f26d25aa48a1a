"""The map of a reduced draft vocabulary: which of the target's tokens can be drafted.

The tensor `d2t` holds offsets: draft id i stands for the target's token i + d2t[i]. (`t2d`, a mask over the
target's tokens, says the same and is not read.)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dspark.checkpoint.config_file import ConfigFile
from dspark.checkpoint.header import StoredTensor
from dspark.checkpoint.weights import WeightFiles
from dspark.errors import CheckpointError

OFFSETS = "d2t"
MASK = "t2d"
DTYPES = {"I64": "<i8", "I32": "<i4"}


def read_draft_vocab_size(config: ConfigFile, weights: WeightFiles, vocab_size: int, said: int | None) -> int:
    """The number of tokens that can be drafted; `said` is what the config says about it.

    Raises:
        CheckpointError: a reduced vocabulary without its map, or a map that contradicts the config or itself.
    """
    size = vocab_size if said is None else said
    if size > vocab_size:
        raise CheckpointError(
            f"{config.path}: draft_vocab_size {size} is more than the target's {vocab_size}"
        )
    stored = weights.tensors.get(OFFSETS)
    if stored is None:
        if size < vocab_size:
            raise CheckpointError(
                f"{weights.where()}: draft_vocab_size is {size} of {vocab_size}, but the map {OFFSETS} "
                "from the draft's tokens to the target's is missing"
            )
        return size
    if said is None and len(stored.shape) == 1:
        size = stored.shape[0]
    if stored.shape != (size,) or stored.dtype not in DTYPES:
        raise CheckpointError(
            f"{stored.file}: tensor {OFFSETS} has shape {list(stored.shape)} and dtype {stored.dtype}, "
            f"expected {[size]} and one of {', '.join(DTYPES)}"
        )
    read_target_ids(stored, vocab_size)
    return size


def read_target_ids(stored: StoredTensor, vocab_size: int) -> NDArray[np.int64]:
    """The target's token of every draft id.

    Raises:
        CheckpointError: a token outside of the target's vocabulary, or two draft ids for one.
    """
    try:
        with stored.file.open("rb") as stream:
            stream.seek(stored.start)
            content = stream.read(stored.stop - stored.start)
    except OSError as error:
        raise CheckpointError(f"{stored.file}: cannot be read ({error})") from error
    offsets = np.frombuffer(content, dtype=DTYPES[stored.dtype]).astype(np.int64)
    tokens = offsets + np.arange(len(offsets))
    outside = np.flatnonzero((tokens < 0) | (tokens >= vocab_size) | (abs(offsets) > vocab_size))
    if len(outside):
        first = int(outside[0])
        raise CheckpointError(
            f"{stored.file}: {OFFSETS} maps the draft's token {first} to {tokens[first]}, outside of the "
            f"target's ids from 0 to {vocab_size - 1}"
        )
    if len(np.unique(tokens)) != len(tokens):
        raise CheckpointError(
            f"{stored.file}: {OFFSETS} maps two of the draft's tokens to the same token of the target"
        )
    return tokens
