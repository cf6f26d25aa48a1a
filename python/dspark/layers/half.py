"""Frozen products in 16 bits, on CPUs where torch would multiply such numbers in software."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark import _core
from dspark.attention.workers import parallel_region
from dspark.devices import has_fast_products, multiplies_in_software
from dspark.layers.by_core import check, multiply

FEW_ROWS = 128
"""Rows up to which the core multiplies, a row being the same to the last bit whatever rows are beside it.
Beyond, the weight is widened for a product in float32, a piece at a time: this takes as long as some 50 rows,
but then less for each row."""

PIECE = 1 << 22
"""Numbers that are widened at a time, 16 MB: there is no copy of a large weight, and threads meet rarely
enough to share their cores with other programs."""


def serves(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products in this dtype are `HalfProduct`'s: on x86-64 with AVX2, if torch has no good ones and
    shares its threads (on one thread, the core would be slower than torch on all)."""
    return (
        multiplies_in_software(dtype, device)
        and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
        and parallel_region() != 0
    )


def is_fast(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a frozen model is faster on `device` in the 16-bit `dtype` than in float32. On a CPU, float16
    is not: the core's attention is for bfloat16."""
    return has_fast_products(dtype, device) or (dtype == torch.bfloat16 and serves(dtype, device))


class HalfProduct:
    """y = x W^T (+ start), with W `[cols, inner]` and x `[rows, inner]` in bfloat16 or float16.

    Sums, start included, are in float32 and rounded once. With few rows, a product takes little longer than
    reading W.
    """

    __slots__ = ("_few", "_weight")

    def __init__(self, weight: Tensor) -> None:
        """`weight` is kept, not copied."""
        self._weight = weight
        self._few = _core.HalfProduct(weight, parallel_region())

    def __call__(self, x: Tensor, start: Tensor | None = None) -> Tensor:
        """`start` has the shape of y, or that of one of its rows.

        Raises:
            RequestError: x or start has another shape or dtype than the weight asks for.
        """
        if start is not None and start.dim() == 1:
            start = start.expand(x.shape[0], -1)
        if x.shape[0] > FEW_ROWS:
            return self._widened(x, start)
        return multiply(self._few, x, start, self._weight.shape, self._weight.dtype)

    def _widened(self, x: Tensor, start: Tensor | None) -> Tensor:
        check(x, start, self._weight.shape, self._weight.dtype)
        wide = x.float()
        out = x.new_empty((x.shape[0], self._weight.shape[0]))
        columns = max(1, PIECE // self._weight.shape[1])
        for first in range(0, out.shape[1], columns):
            piece = slice(first, first + columns)
            product = torch.mm(wide, self._weight[piece].float().t())
            out[:, piece] = product if start is None else product.add_(start[:, piece])
        return out
