"""Products of a few rows by the core, which reads and writes tensors by address."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark import _core
from dspark.errors import RequestError


def check(x: Tensor, start: Tensor | None, shape: torch.Size, dtype: torch.dtype) -> None:
    """Refuses what torch's products would.

    Raises:
        RequestError: x is not `[rows, inner]` or start not `[rows, cols]`, in this dtype and on the CPU, with
            `shape` (cols, inner).
    """
    if x.shape[1:] != shape[1:] or x.dtype != dtype or not x.is_cpu:
        raise RequestError(
            f"expected rows of {shape[1]} numbers in {dtype} on the CPU, found {list(x.shape)} in {x.dtype} "
            f"on {x.device}"
        )
    if start is None:
        return
    expected = (x.shape[0], shape[0])
    if start.shape != expected or start.dtype != dtype or not start.is_cpu:
        raise RequestError(
            f"expected a product to start from {list(expected)} in {dtype} on the CPU, found "
            f"{list(start.shape)} in {start.dtype} on {start.device}"
        )


def multiply(
    product: _core.SmallProduct | _core.HalfProduct,
    x: Tensor,
    start: Tensor | None,
    shape: torch.Size,
    dtype: torch.dtype,
) -> Tensor:
    """(start +) x W^T by the product of a weight W of this shape and dtype; errors as in `check`."""
    check(x, start, shape, dtype)
    x = x.contiguous()
    out = x.new_empty((x.shape[0], shape[0]))
    address = 0
    if start is not None:
        start = start.contiguous()
        address = start.data_ptr()
    product.run(x.data_ptr(), x.shape[0], address, out.data_ptr())
    return out
