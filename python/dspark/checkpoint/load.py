"""Filling a model's parameters from safetensors files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

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


class _NoInitialisation(TorchFunctionMode):
    """Leaves tensors that `torch.nn.init` would fill as they are."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


@contextmanager
def on_meta() -> Iterator[None]:
    """Modules made in this context have shapes but no weights. They are not even initialised on the meta
    device, because that imports half of torch's compiler for nothing (2 s, 160 MB)."""
    with torch.device("meta"), _NoInitialisation():
        yield


def load_parameters(
    model: nn.Module,
    weights: WeightFiles,
    names: Mapping[str, str],
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> None:
    """Replaces all parameters of `model` at once; see `ParameterReader`."""
    ParameterReader(model, weights, names, device, dtype, progress).fill("")


class ParameterReader:
    """Replaces the parameters of a model (built on the meta device) by those of a checkpoint, part by part.

    Tensors are read into memory of their own, not mapped: a mapped file counts as the process's memory in
    addition to the copy, and its contents would change with the file.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: WeightFiles,
        names: Mapping[str, str],
        device: torch.device,
        dtype: torch.dtype,
        progress: Progress | None = None,
    ) -> None:
        """`names` maps each parameter's name to its tensor's. Everything is checked before anything is read,
        and nothing is left uninitialised: a parameter without an entry must have been filled already.

        Raises:
            CheckpointError: names the tensor, what was expected and what was found.
        """
        parameters = dict(model.named_parameters())
        left = [name for name, parameter in parameters.items() if parameter.is_meta and name not in names]
        if left:
            raise CheckpointError(f"{weights.where()}: nothing is stored for the parameter {left[0]}")
        self._model, self._device, self._dtype, self._progress = model, device, dtype, progress
        plan = {name: weights.check(stored, tuple(parameters[name].shape)) for name, stored in names.items()}
        order = {file: index for index, file in enumerate(weights.files)}
        # Read in the order in which they are on disk.
        self._plan = dict(sorted(plan.items(), key=lambda item: (order[item[1].file], item[1].start)))
        self._total = sum(stored.stop - stored.start for stored in plan.values())
        self._done = 0
        self._orders: dict[str, torch.Tensor] = {}

    def reorder(self, name: str, order: torch.Tensor) -> None:
        """Row i of the parameter `name`, if it is yet to be read, will be row order[i] of its tensor."""
        self._orders[name] = order

    def vectors(self) -> None:
        """Fills all parameters of one dimension."""
        self._fill([name for name, stored in self._plan.items() if len(stored.shape) == 1])

    def fill(self, prefix: str) -> None:
        """Fills the parameters whose names start with `prefix` and which have not been filled yet."""
        self._fill([name for name in self._plan if name.startswith(prefix)])

    def _fill(self, names: list[str]) -> None:
        for name in names:
            stored = self._plan.pop(name)
            with torch.inference_mode(False), torch.no_grad():
                tensor = read_tensor(stored)
                if name in self._orders:
                    tensor = tensor[self._orders[name]]
                _place(self._model, name, tensor.to(device=self._device, dtype=self._dtype))
            self._done += stored.stop - stored.start
            if self._progress is not None:
                self._progress(self._done, self._total)


def read_tensor(stored: StoredTensor) -> torch.Tensor:
    """One tensor, as stored, in memory of its own.

    Raises:
        CheckpointError: the file cannot be read, or has become shorter than its header says.
    """
    tensor = torch.empty(stored.shape, dtype=TORCH_DTYPES[stored.dtype])
    if not tensor.numel():
        return tensor
    room = memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    try:
        with stored.file.open("rb", buffering=0) as stream:
            stream.seek(stored.start)
            while len(room):
                count = stream.readinto(room)
                if not count:
                    raise CheckpointError(f"{stored.file}: truncated within the tensor {stored.name}")
                room = room[count:]
    except OSError as error:
        raise CheckpointError(f"{stored.file}: cannot be read ({error})") from error
    return tensor


def _place(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    owner_name, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner_name), leaf, nn.Parameter(tensor, requires_grad=False))
