"""torch's OpenMP threads, for the core's attention."""

from __future__ import annotations

import ctypes
import re
from functools import cache
from pathlib import Path

_LIBRARY = re.compile(r"/lib(?:g|i)?omp[^/]*\.so[^/]*$")


@cache
def parallel_region() -> int:
    """Address of `GOMP_parallel` in the OpenMP library that torch has loaded; 0 where there is none to be
    found, or more than one, and the core's attention runs on one thread."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:  # not Linux
        return 0
    paths = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if "/" in line}
    loaded = [path for path in paths if _LIBRARY.search(path)]
    if len(loaded) != 1:
        return 0
    try:
        function = ctypes.CDLL(loaded[0]).GOMP_parallel
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0
