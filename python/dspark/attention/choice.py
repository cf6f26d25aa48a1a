"""Who attends in a model's passes of few rows, chosen once when the model is ready for inference."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from dspark import _core
from dspark.attention.cached import CORE_DTYPES, CORE_LANES
from dspark.attention.kernel import DTYPES, HEAD_SIZES, entries
from dspark.kernels import look, prepare


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """`runs` is "kernel", "core" or "torch", `why` says why. Many rows at once are torch's in any case."""

    runs: str
    why: str
    kernels: _core.Kernels | None = None
    """For `CachedAttention`."""


def choose_attention(device: torch.device, dtype: torch.dtype, head_sizes: Iterable[int]) -> AttentionChoice:
    """The kernel where `device` has it for this dtype and one of these head sizes, compiled here and now; else
    the core on a CPU; else torch."""
    sizes = sorted(set(head_sizes))
    choice = look(device)
    served = [size for size in sizes if size in HEAD_SIZES and dtype in DTYPES]
    why = choice.reason or f"there is no kernel for {_words(dtype, sizes)}"
    if choice.kernels is not None and served:
        failure = prepare(choice.kernels, "attention", entries(dtype, served))
        if failure is None:
            return AttentionChoice("kernel", f"{device} has it for {_words(dtype, served)}", choice.kernels)
        why = failure
    by_core = device.type == "cpu" and dtype in CORE_DTYPES and any(size % CORE_LANES == 0 for size in sizes)
    return AttentionChoice("core" if by_core else "torch", why)


def _words(dtype: torch.dtype, sizes: list[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')} heads of {' and '.join(map(str, sizes))}"
