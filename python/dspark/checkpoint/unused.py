"""Which tensors of a checkpoint nothing reads."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dspark.checkpoint.weights import WeightFiles


def unused_tensors(weights: WeightFiles, read: Collection[str], ignored: Sequence[str]) -> list[str]:
    """Names of tensors that are not among those `read`, without those left out on purpose, whose names start
    with one of `ignored`."""
    return sorted(name for name in set(weights.tensors) - set(read) if not name.startswith(tuple(ignored)))


def some_of(names: Sequence[str]) -> str:
    """The first few names, for a message."""
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
