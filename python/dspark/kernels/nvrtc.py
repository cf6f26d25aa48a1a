"""Where torch's NVRTC is, and where compiled kernels are kept."""

from __future__ import annotations

import os
import re
from pathlib import Path

from dspark.errors import KernelError
from dspark.pretrained import cache_root

_LIBRARY = re.compile(r"/libnvrtc(-[0-9a-f]+)?\.so[.0-9]*$")


def find_nvrtc() -> str:
    """Path of the NVRTC to compile with: `$DSPARK_NVRTC`, else the one that torch has loaded or ships with.

    Imports torch: NVRTC finds its own files only in a process where torch has loaded it.

    Raises:
        KernelError: this torch has none, like the builds for CPUs alone.
    """
    if own := os.environ.get("DSPARK_NVRTC"):
        return own
    import torch

    if loaded := _loaded():
        return loaded
    packages = Path(torch.__file__).parents[1]
    for folder in ("torch/lib", "nvidia/*/lib"):
        for path in sorted(packages.glob(f"{folder}/libnvrtc*"), reverse=True):
            if _LIBRARY.search(str(path)):
                return str(path)
    raise KernelError(f"torch {torch.__version__} does not ship NVRTC, which compiles the kernels")


def _loaded() -> str | None:
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:  # not Linux
        return None
    paths = (line.split(maxsplit=5)[-1] for line in maps.splitlines() if "libnvrtc" in line)
    return next((path for path in paths if _LIBRARY.search(path)), None)


def kernel_cache() -> str:
    """The folder of compiled kernels: `$DSPARK_KERNEL_CACHE`, else `kernels` in dspark's cache."""
    return os.environ.get("DSPARK_KERNEL_CACHE") or str(cache_root() / "kernels")
