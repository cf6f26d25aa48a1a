"""The choice between kernels and torch's operations, made once per device."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

import torch

from dspark import _core
from dspark.errors import DSparkError, KernelError
from dspark.kernels.nvrtc import find_nvrtc, kernel_cache

ROLES = ("attention", "recurrence", "sampling")
"""What kernels do for a decoder; `DSparkDecoder.info()` says for each who does it."""

_DRIVER = "libcuda.so.1"
_STAND_IN = "stand-in on the host"
"""The name that the stand-in for the driver (cuda/emulate/driver.cpp) gives its device."""

_VARIABLES = ("DSPARK_KERNELS", "DSPARK_CUDA_DRIVER", "DSPARK_NVRTC", "DSPARK_KERNEL_CACHE")


class KernelWarning(UserWarning):
    """Kernels cannot be used where they were meant to be; torch's operations take over."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernels of a device, or the reason why there are none."""

    kernels: _core.Kernels | None
    reason: str | None = None


_made: dict[tuple[str | None, ...], Choice] = {}
_guard = Lock()


def choose(device: torch.device) -> Choice:
    """The choice for `device`, made once and kept.

    A GPU has kernels unless `$DSPARK_KERNELS` is "off" or something fails, which gives one `KernelWarning`;
    `KernelError` if torch's operations then fail too, as after a fault on the device. A CPU has kernels only
    if `$DSPARK_CUDA_DRIVER` names a stand-in for the driver, whose device memory is ordinary memory; that is
    for tests.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    key = (str(device), *(os.environ.get(name) for name in _VARIABLES))
    with _guard:
        if key not in _made:
            _made[key] = _look(device)
        return _made[key]


def _look(device: torch.device) -> Choice:
    driver = os.environ.get("DSPARK_CUDA_DRIVER")
    if os.environ.get("DSPARK_KERNELS") == "off":
        return Choice(None, "DSPARK_KERNELS is off")
    if device.type != "cuda" and not (device.type == "cpu" and driver):
        return Choice(None, f"the device is {device}")
    if torch.version.hip is not None and not driver:
        return Choice(None, "this torch is not built for CUDA")
    try:
        return Choice(_open(device, driver or _DRIVER))
    except (DSparkError, RuntimeError) as error:  # torch's own errors of a device are RuntimeErrors
        try:
            torch.zeros(1, device=device).tolist()
        except RuntimeError as lost:
            raise KernelError(
                f"neither kernels nor torch's operations work on {device} in this process ({error}): "
                f"start a new one with DSPARK_KERNELS=off to do without kernels"
            ) from lost
        _warn(f"no CUDA kernels on {device}", str(error))
        return Choice(None, str(error))


def _open(device: torch.device, driver: str) -> _core.Kernels:
    out = torch.zeros(2 * 64, dtype=torch.int64, device=device)
    kernels = _core.Kernels(driver, find_nvrtc(), kernel_cache(), device.index or 0)
    if (kernels.name == _STAND_IN) != (device.type == "cpu"):
        raise KernelError(f"{driver} drives {kernels.name}, but the tensors are on {device}")
    kernels.probe(out.data_ptr(), 2, 5, stream(device))
    if out.tolist() != list(range(5, 5 + len(out))):
        raise KernelError(f"a kernel ran on {kernels.name}, but torch does not see what it wrote")
    return kernels


def prepare(kernels: _core.Kernels, role: str, entries: Sequence[str]) -> str | None:
    """Compiles and loads the kernels that `role` needs, so that no pass has to.

    Returns:
        None if they are ready; else the reason, which is also given in a `KernelWarning`.
    """
    try:
        kernels.prepare(entries)
    except KernelError as error:
        _warn(f"no CUDA kernels for {role}", str(error))
        return str(error)
    return None


def stream(device: torch.device) -> int:
    """The handle of torch's current stream on `device`; 0 on a CPU."""
    return 0 if device.type == "cpu" else int(torch.cuda.current_stream(device).cuda_stream)


def _warn(what: str, reason: str) -> None:
    warnings.warn(f"{what}, so torch's operations are used: {reason}", KernelWarning, stacklevel=2)
