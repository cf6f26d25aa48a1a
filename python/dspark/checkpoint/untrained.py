"""Whether a checkpoint looks as if it had never been trained."""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterable

from dspark.checkpoint.header import StoredTensor
from dspark.checkpoint.weights import WeightFiles
from dspark.errors import CheckpointError

_log = logging.getLogger("dspark")

WARNING = "every normalisation weight is exactly 1.0: this checkpoint looks untrained"

_ONES = {
    "F64": struct.pack("<d", 1.0),
    "F32": struct.pack("<f", 1.0),
    "F16": b"\x00\x3c",
    "BF16": b"\x80\x3f",
}
"""1.0 as stored in each dtype."""

_LONGEST_NORM = 1 << 20
"""Elements: a longer tensor is not a norm, and is not read for this check."""


def looks_untrained(weights: WeightFiles, names: Iterable[str]) -> bool:
    """Whether there are normalisation weights among the tensors and each is exactly 1.0; reads these alone.

    Raises `CheckpointError` for a file that cannot be read.
    """
    norms = [weights.tensors[name] for name in names if "norm" in name and name.endswith(".weight")]
    return bool(norms) and all(_all_ones(norm) for norm in norms)


def warn_if_untrained(weights: WeightFiles, names: Iterable[str]) -> None:
    """Logs a warning if `looks_untrained`; such a checkpoint is loaded all the same."""
    if looks_untrained(weights, names):
        _log.warning("%s: %s", weights.directory, WARNING)


def _all_ones(stored: StoredTensor) -> bool:
    one = _ONES.get(stored.dtype)
    if one is None or len(stored.shape) != 1 or stored.elements > _LONGEST_NORM:
        return False
    try:
        with stored.file.open("rb") as stream:
            stream.seek(stored.start)
            return stream.read(stored.stop - stored.start) == one * stored.elements
    except OSError as error:
        raise CheckpointError(f"{stored.file}: cannot be read ({error})") from error
