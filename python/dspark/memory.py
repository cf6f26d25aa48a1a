"""How much memory is free."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from dspark.cgroups import own_groups

if TYPE_CHECKING:
    import torch

_MEMINFO = Path("/proc/meminfo")


def available_bytes(device: torch.device) -> int | None:
    """Bytes that can be allocated on `device` without taking them from others; `None` if nothing tells.

    On a GPU, what its driver reports as free plus what torch's allocator holds unused; else what Linux
    reports as available, within the limits of a container or service (cgroup v2), or all physical memory on
    other systems.
    """
    if device.type == "cuda":
        import torch

        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    known = [bytes_ for bytes_ in (_of_the_machine(), _of_the_container()) if bytes_ is not None]
    return min(known, default=None)


def _of_the_machine() -> int | None:
    try:
        for line in _MEMINFO.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    except (OSError, ValueError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # Windows has no sysconf
        return None


def _of_the_container() -> int | None:
    """The least that any of this process's control groups leaves."""
    left = [_of_the_group(group) for group in own_groups()]
    return min((bytes_ for bytes_ in left if bytes_ is not None), default=None)


def _of_the_group(group: Path) -> int | None:
    """The group's limit minus what cannot be reclaimed; cached files can."""
    try:
        limit = int((group / "memory.max").read_text(encoding="ascii"))  # "max", no limit: ValueError
        kept = (line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        return max(limit - sum(int(value) for name, value in kept if name in ("anon", "kernel")), 0)
    except (OSError, ValueError):
        return None
