"""What computes the linear layers of a pass: our kernels where a device has them, else torch's operations.

Both keep the promise of `HybridCache`: a pass does not change the states, and what its rows would change
waits for the commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dspark import _core
from dspark.errors import KernelError
from dspark.kernels import Choice, prepare
from dspark.target.hybrid.cache import HybridCache
from dspark.target.hybrid.config import DeltaSizes
from dspark.target.hybrid.kernel import DeltaKernelPass
from dspark.target.hybrid.mixer import DeltaWeights
from dspark.target.hybrid.segments import DeltaPass


class LayersOfPass(Protocol):
    """One pass: packed rows of several requests, each with its own states."""

    def layer(self, index: int, mixed: Tensor, weights: DeltaWeights) -> Tensor:
        """Linear layer `index`: mixed `[rows, channels + values + 2 value heads]` to `[rows, values]`."""


class Recurrence(Protocol):
    """Begins passes. `how`, for `DSparkDecoder.info()`: "kernel" or "torch", and why."""

    how: str

    def begin(self, segments: Sequence[tuple[HybridCache, int]]) -> LayersOfPass:
        """Begins a pass over so many rows for each cache, of which its `advance` may then keep a part."""


class TorchRecurrence:
    """torch's own operations: any sizes, any number of rows."""

    def __init__(self, sizes: DeltaSizes, reason: str) -> None:
        self.how = f"torch: {reason}"
        self._sizes = sizes

    def begin(self, segments: Sequence[tuple[HybridCache, int]]) -> LayersOfPass:
        """See `Recurrence.begin`."""
        return DeltaPass(segments, self._sizes)


class KernelRecurrence:
    """One launch per layer where no request has many rows. Passes over prompts are left to torch, because
    most of their work is matrix products."""

    def __init__(self, kernel: _core.KernelDelta, sizes: DeltaSizes, dtype: torch.dtype) -> None:
        self.how = f"kernel: heads of {sizes.key_dim} and {sizes.value_dim}"
        self._kernel, self._sizes, self._dtype = kernel, sizes, dtype

    def begin(self, segments: Sequence[tuple[HybridCache, int]]) -> LayersOfPass:
        """See `Recurrence.begin`."""
        if max(count for _, count in segments) > self._kernel.MOST_ROWS:
            return DeltaPass(segments, self._sizes)
        return DeltaKernelPass(self._kernel, segments, self._sizes, self._dtype)


def recurrence(choice: Choice, sizes: DeltaSizes, dtype: torch.dtype) -> Recurrence:
    """The recurrence of a model in `dtype`: by kernels, or by torch where the kernels do not serve it."""
    if choice.kernels is None:
        return TorchRecurrence(sizes, str(choice.reason))
    name = str(dtype).removeprefix("torch.")
    shape = (sizes.key_heads, sizes.groups, sizes.key_dim, sizes.value_dim, sizes.kernel)
    try:
        kernel = _core.KernelDelta(choice.kernels, name, *shape)
    except KernelError as error:
        return TorchRecurrence(sizes, str(error))
    failure = prepare(choice.kernels, "recurrence", kernel.entries)
    if failure is not None:
        return TorchRecurrence(sizes, failure)
    return KernelRecurrence(kernel, sizes, dtype)
