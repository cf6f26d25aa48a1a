"""What computes the attention of a model's passes over few rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from dspark import _core
from dspark.attention.kernel import DTYPES, HEAD_SIZES, entries
from dspark.kernels import Choice, prepare


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """The compiled attention kernel of one model, or None, and the reason. Requests with more rows than a
    verify pass or a draft block has are left to torch in any case."""

    kernels: _core.Kernels | None
    how: str
    """For `DSparkDecoder.info()`: "kernel" or "torch", and why."""


def attention_kernel(choice: Choice, dtype: torch.dtype, head_sizes: Iterable[int]) -> AttentionKernel:
    """The kernel for a model with heads of these sizes; sizes without a kernel stay with torch."""
    sizes = sorted(set(head_sizes))
    served = [size for size in sizes if size in HEAD_SIZES] if dtype in DTYPES else []
    name = str(dtype).removeprefix("torch.")
    if choice.kernels is None:
        return AttentionKernel(None, f"torch: {choice.reason}")
    if not served:
        return AttentionKernel(None, f"torch: there is no kernel for {name} heads of {_listed(sizes)}")
    failure = prepare(choice.kernels, "attention", entries(dtype, served))
    if failure is not None:
        return AttentionKernel(None, f"torch: {failure}")
    return AttentionKernel(choice.kernels, f"kernel: {name} heads of {_listed(served)}")


def _listed(sizes: list[int]) -> str:
    return " and ".join(map(str, sizes))
