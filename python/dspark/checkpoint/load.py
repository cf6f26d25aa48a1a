"""Filling a model's parameters from safetensors files."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from dspark.checkpoint.header import StoredTensor
from dspark.checkpoint.weights import WeightFiles
from dspark.errors import CheckpointError

Progress = Callable[[int, int], None]
"""Called with bytes read so far and in all."""

TORCH_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def resolve_dtype(dtype: torch.dtype | str, weights: WeightFiles, names: Mapping[str, str]) -> torch.dtype:
    """`dtype`, or for "auto" the one in which most of the checkpoint is stored."""
    if dtype == "auto":
        return TORCH_DTYPES[weights.main_dtype(names.values())]
    if isinstance(dtype, torch.dtype) and dtype in TORCH_DTYPES.values():
        return dtype
    raise CheckpointError(f"dtype must be 'auto', float64, float32, float16 or bfloat16, found {dtype!r}")


def load_parameters(
    model: nn.Module,
    weights: WeightFiles,
    names: Mapping[str, str],
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> None:
    """Replaces the parameters of `model` (built on the meta device) by those of the checkpoint.

    `names` maps each parameter's name to its tensor's. Everything is checked before anything is read, and
    nothing is left uninitialised: a parameter without an entry must have been filled already.
    """
    parameters = dict(model.named_parameters())
    left = [name for name, parameter in parameters.items() if parameter.is_meta and name not in names]
    if left:
        raise CheckpointError(f"{weights.where()}: nothing is stored for the parameter {left[0]}")
    plan = {name: weights.check(stored, tuple(parameters[name].shape)) for name, stored in names.items()}
    total = sum(stored.stop - stored.start for stored in plan.values())
    done = 0
    for file in weights.files:
        wanted = {name: stored for name, stored in plan.items() if stored.file == file}
        if not wanted:
            continue
        try:
            with safe_open(file, framework="pt") as reader:
                for name, stored in wanted.items():
                    _place(model, name, _copy(reader.get_tensor(stored.name), device, dtype))
                    done += stored.stop - stored.start
                    if progress is not None:
                        progress(done, total)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: cannot be read ({error})") from error


def _copy(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Always a copy: what safetensors gives may still be the mapped file."""
    return torch.empty(tensor.shape, dtype=dtype, device=device).copy_(tensor)


def _place(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    owner_name, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner_name), leaf, nn.Parameter(tensor, requires_grad=False))


def unused(weights: WeightFiles, names: Mapping[str, str]) -> list[StoredTensor]:
    """Tensors of the checkpoint that no parameter took."""
    taken = set(names.values())
    return [stored for name, stored in sorted(weights.tensors.items()) if name not in taken]
