"""torch's OpenMP threads, for the core's attention and products."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch


@cache
def parallel_region() -> int:
    """Address of `GOMP_parallel` in the OpenMP library that torch runs on; 0 where it cannot be found:
    the core then works on one thread.

    Looked up through torch's own library, whose dependencies are searched first: a process may hold more
    OpenMP libraries (scikit-learn brings one), and the threads of two would compete for the cores.
    """
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        function = ctypes.CDLL(str(library)).GOMP_parallel
    except (OSError, AttributeError):  # another system, or torch built without OpenMP
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0
