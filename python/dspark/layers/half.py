"""Frozen products in 16 bits, on CPUs where torch would multiply such numbers in software."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark import _core
from dspark.attention.workers import parallel_region
from dspark.devices import has_fast_products, multiplies_in_software
from dspark.errors import RequestError

FEW_ROWS = 128
"""Rows up to which the core multiplies, a row being the same to the last bit whatever rows are beside it.
Beyond, the weight is widened for a product in float32, a piece at a time: this takes as long as some 50 rows,
but then less for each row."""

PIECE = 1 << 20
"""Numbers that are widened at a time: they stay in the caches, and there is no copy of the whole weight."""


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


def check_rows(x: Tensor, inner: int, dtype: torch.dtype) -> None:
    """Refuses what torch's products would, for the core reads by address.

    Raises:
        RequestError: x is not `[rows, inner]`, in this dtype and on the CPU.
    """
    if x.shape[1:] != (inner,) or x.dtype != dtype or not x.is_cpu:
        raise RequestError(
            f"expected rows of {inner} numbers in {dtype} on the CPU, found {list(x.shape)} in {x.dtype} on "
            f"{x.device}"
        )


class HalfProduct:
    """y = x W^T (+ start), with W `[cols, inner]` and x `[rows, inner]` in bfloat16 or float16.

    Sums, start included, are in float32 and rounded once. With few rows, a product takes little longer than
    reading W.
    """

    __slots__ = ("_few", "_inner", "_weight")

    def __init__(self, weight: Tensor) -> None:
        """`weight` is kept, not copied."""
        self._weight = weight
        self._inner = weight.shape[1]
        self._few = _core.HalfProduct(weight, parallel_region())

    def __call__(self, x: Tensor, start: Tensor | None = None) -> Tensor:
        """`start` has the shape of y, or that of one of its rows.

        Raises:
            RequestError: x or start has another shape or dtype than the weight asks for.
        """
        check_rows(x, self._inner, self._weight.dtype)
        if start is not None and start.dtype != x.dtype:
            raise RequestError(f"a product of {x.dtype} was to start from {start.dtype}")
        if x.shape[0] > FEW_ROWS:
            return self._widened(x, start)
        x = x.contiguous()
        out = x.new_empty((x.shape[0], self._weight.shape[0]))
        address = 0
        if start is not None:
            start = start.expand_as(out).contiguous()
            address = start.data_ptr()
        self._few.run(x.data_ptr(), x.shape[0], address, out.data_ptr())
        return out

    def _widened(self, x: Tensor, start: Tensor | None) -> Tensor:
        wide = x.float()
        out = wide.new_empty((x.shape[0], self._weight.shape[0]))
        columns = max(1, PIECE // self._weight.shape[1])
        for piece, weight in zip(
            torch.split(out, columns, 1), torch.split(self._weight, columns), strict=True
        ):
            torch.mm(wide, weight.float().t(), out=piece)
        if start is not None:
            out += start
        return out.to(x.dtype)
