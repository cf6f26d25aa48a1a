"""Frozen linear products: several `nn.Linear` of the same input as one, prepacked where that pays."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from dspark import _core
from dspark.devices import multiplies_in_software
from dspark.layers.by_core import multiply
from dspark.layers.half import HalfProduct, serves

EXPECTED_ROWS = 8
"""The number of rows that weights are packed for: a draft block, or a verify pass."""

PACK_FROM = {torch.float32: 1 << 17, torch.bfloat16: 0}
"""Elements from which a packed weight is faster. In f32 a small product takes less time than oneDNN's setup
(measured: 256 x 256 breaks even at 8 rows, 576 x 576 takes 39 us instead of 75). f64 and f16 are not
packed."""


FEW_ROWS = 16
"""Rows up to which the core's product of a small weight is faster; beyond, a BLAS has enough to do."""


def _operation(name: str, overload: str = "default") -> Callable[..., Tensor] | None:
    """A private operation of torch, or None where this build does not have it."""
    packet = getattr(torch.ops.mkldnn, name, None)
    return getattr(packet, overload, None) if packet is not None else None


_reorder = _operation("_reorder_linear_weight")
_pointwise = _operation("_linear_pointwise")
_pointwise_binary = _operation("_linear_pointwise", "binary")


def _can_pack(weight: Tensor) -> bool:
    if _reorder is None or _pointwise is None or _pointwise_binary is None:
        return False
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if multiplies_in_software(weight.dtype, weight.device):
        return False
    return weight.numel() >= PACK_FROM.get(weight.dtype, weight.numel() + 1)


def _is_small(weight: Tensor) -> bool:
    """Whether the core's product is meant for this weight; it was measured on x86-64 alone."""
    if weight.dtype != torch.float32 or not weight.is_cpu or platform.machine() not in ("x86_64", "AMD64"):
        return False
    return 0 < weight.numel() < PACK_FROM[torch.float32]


class FusedLinear:
    """y = x W^T + b for the stacked rows of one or more linears, without gradients.

    `add(x, residual)` returns residual + y in the same operation; a bias is added to the residual first. x
    must be two-dimensional, `[rows, in]`.
    With `input_scale` `[in]` the product is that of input_scale * x: the scale is folded into the weight.

    Large weights go through oneDNN's packed product, small f32 ones with few rows through the core's (2 to 16
    rows; 8 rows with 96 x 512 take 5 us instead of 11), those in 16 bits that torch would multiply in
    software through the core's as well, the rest through torch's own.
    """

    __slots__ = ("bias", "half", "packed", "shape", "small", "weight_t")

    def __init__(
        self, linears: Sequence[nn.Linear], input_scale: Tensor | None = None, release: bool = False
    ) -> None:
        """With `release`, takes weights and biases out of the linears, so that they are in memory no longer
        than needed."""
        weights = [linear.weight.detach() for linear in linears]
        self.bias = _stacked_bias(linears)
        if release:
            for linear in linears:
                linear.weight = linear.bias = None  # type: ignore[assignment]
        weight = torch.cat(weights) if len(weights) > 1 else weights[0].contiguous()
        del weights
        if input_scale is not None:
            weight = weight * input_scale
        self.shape = weight.shape
        self.packed: Tensor | None = None
        self.weight_t: Tensor | None = None
        self.small: _core.SmallProduct | None = None
        self.half: HalfProduct | None = None
        if serves(weight.dtype, weight.device) and weight.numel():
            self.half = HalfProduct(weight)
        elif _can_pack(weight):
            self.packed = _reorder(weight, EXPECTED_ROWS)  # type: ignore[misc]
        else:
            self.weight_t = weight.t()
            if self.bias is None and _is_small(weight):
                self.small = _core.SmallProduct(weight)

    def __call__(self, x: Tensor) -> Tensor:
        if self.half is not None:
            return self.half(x, self.bias)
        if self.packed is not None:
            return _pointwise(x, self.packed, self.bias, "none", [], "")  # type: ignore[misc]
        if self.small is not None and 1 < x.shape[0] <= FEW_ROWS:
            return multiply(self.small, x, None, self.shape, torch.float32)
        if self.bias is None:
            return torch.mm(x, self.weight_t)  # type: ignore[arg-type]
        return torch.addmm(self.bias, x, self.weight_t)  # type: ignore[arg-type]

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        if self.half is not None:
            return self.half(x, residual if self.bias is None else residual + self.bias)
        if self.packed is not None:
            return _pointwise_binary(x, residual, self.packed, self.bias, "add")  # type: ignore[misc]
        if self.small is not None and 1 < x.shape[0] <= FEW_ROWS:
            return multiply(self.small, x, residual, self.shape, torch.float32)
        if self.bias is not None:
            residual = residual + self.bias
        return torch.addmm(residual, x, self.weight_t)  # type: ignore[arg-type]


def _stacked_bias(linears: Sequence[nn.Linear]) -> Tensor | None:
    if all(linear.bias is None for linear in linears):
        return None
    rows = [
        linear.weight.new_zeros(linear.weight.shape[0]) if linear.bias is None else linear.bias.detach()
        for linear in linears
    ]
    return torch.cat(rows)
