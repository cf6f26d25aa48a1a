"""Root-mean-square normalisation: y = w x / sqrt(mean(x^2) + eps), or with 1 + w where a model says so."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which norms and rotations are computed: f32 for f16 and bf16, else the model's own."""
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


class RMSNorm(nn.Module):
    """The norm of Llama and Qwen, over the last dimension. Differentiable; `FrozenNorm` is its fast twin.

    With `offset` the factor is offset + w, where w is what is stored.
    """

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), 1.0 - offset))
        self.eps = eps
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight + self.offset if self.offset else self.weight
        # Under autocast x may be narrower than the parameter, and torch gives float32 on a GPU.
        return F.rms_norm(x, self.weight.shape, weight.to(x.dtype), self.eps).to(x.dtype)


class FrozenNorm:
    """`RMSNorm` for inference in four operations, or three where the weight is folded into the next product.

    With n = |x| and d entries, sqrt(mean(x^2) + eps) = hypot(n, sqrt(d eps)) / sqrt(d): the sqrt(d) joins the
    weight. On a CPU, torch's own `rms_norm` is a chain of seven small operations, and it is their number that
    a pass over a few rows pays for.
    """

    __slots__ = ("accumulate", "narrow", "shift", "weight")

    def __init__(self, norm: RMSNorm, *, weightless: bool = False) -> None:
        weight = norm.weight.detach()
        self.accumulate = accumulation_dtype(weight.dtype)
        self.narrow = None if self.accumulate == weight.dtype else weight.dtype
        self.weight = None if weightless else scaled_weight(norm)
        self.shift = torch.tensor(
            math.sqrt(weight.shape[0] * norm.eps), dtype=self.accumulate, device=weight.device
        )

    def __call__(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, 2, -1, True, dtype=self.accumulate)
        y = x / torch.hypot(length, self.shift)
        if self.weight is not None:
            y.mul_(self.weight)
        return y if self.narrow is None else y.to(self.narrow)


def scaled_weight(norm: RMSNorm) -> Tensor:
    """The factor that a weightless `FrozenNorm` leaves out: (offset + w) sqrt(d)."""
    weight = norm.weight.detach()
    factor = weight.to(accumulation_dtype(weight.dtype))
    if norm.offset:
        factor = factor + norm.offset
    return factor * math.sqrt(weight.shape[0])
