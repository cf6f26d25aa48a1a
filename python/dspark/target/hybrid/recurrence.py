"""Who computes the linear layers of a pass: our kernels where a device has them, else torch's operations.

Chosen once, when a model is built. Both keep the promise of `HybridCache`: a pass leaves the states, and what
its rows would change waits for the commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from dspark.target.hybrid.cache import HybridCache
from dspark.target.hybrid.config import DeltaSizes
from dspark.target.hybrid.kernel import MOST_ROWS, KernelPass, dtype_name, kernel_sizes
from dspark.target.hybrid.mixer import DeltaWeights
from dspark.target.hybrid.segments import DeltaPass

if TYPE_CHECKING:
    from dspark._core import Kernels


class LayersOfPass(Protocol):
    """One pass: packed rows of several requests, each with its own states."""

    def layer(self, index: int, mixed: Tensor, weights: DeltaWeights) -> Tensor:
        """mixed `[rows, channels + values + 2 value heads]` of linear layer `index`, to `[rows, values]`."""


class Recurrence(Protocol):
    """`runs` is "kernel" or "torch", `why` says why."""

    runs: str
    why: str

    def begin(self, segments: Sequence[tuple[HybridCache, int]]) -> LayersOfPass:
        """A pass over so many rows of each cache, which its `advance` may then keep in part."""


class TorchRecurrence:
    """torch's own operations: any sizes, any number of rows."""

    runs = "torch"

    def __init__(self, sizes: DeltaSizes, why: str) -> None:
        self.why = why
        self._sizes = sizes

    def begin(self, segments: Sequence[tuple[HybridCache, int]]) -> LayersOfPass:
        """See `Recurrence.begin`."""
        return DeltaPass(segments, self._sizes)


class KernelRecurrence:
    """One launch per layer for passes of at most `MOST_ROWS` rows per request; longer ones, which read prompts,
    are torch's: their work is in matrix products."""

    runs = "kernel"

    def __init__(self, kernels: Kernels, sizes: DeltaSizes, dtype: torch.dtype) -> None:
        self.why = f"passes of at most {MOST_ROWS} rows per request; longer ones are torch's"
        self._kernels, self._sizes, self._dtype = kernels, sizes, dtype

    def begin(self, segments: Sequence[tuple[HybridCache, int]]) -> LayersOfPass:
        """See `Recurrence.begin`."""
        if max(count for _, count in segments) > MOST_ROWS:
            return DeltaPass(segments, self._sizes)
        return KernelPass(self._kernels, segments, self._sizes, self._dtype)


def choose(kernels: Kernels | None, sizes: DeltaSizes, dtype: torch.dtype, reason: str) -> Recurrence:
    """The recurrence of a model in `dtype`; `reason` says why there are no kernels, if there are none."""
    if kernels is None:
        return TorchRecurrence(sizes, reason)
    refusal = kernels.delta_refusal(dtype_name(dtype), kernel_sizes(sizes))
    return KernelRecurrence(kernels, sizes, dtype) if refusal is None else TorchRecurrence(sizes, refusal)
