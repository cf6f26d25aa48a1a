"""How many CPUs a process may use."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from dspark.cgroups import own_groups

_log = logging.getLogger("dspark")


def usable_cpus() -> int | None:
    """How many CPUs this process may run on, or fewer if a container's quota (cgroup v2) gives it less time;
    `None` if nothing tells."""
    try:
        allowed: int | None = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        allowed = os.cpu_count()
    quotas = [quota for group in own_groups() if (quota := _quota(group)) is not None]
    return min((count for count in (allowed, *quotas) if count is not None), default=None)


def warn_of_idle_threads(threads: int) -> None:
    """Logs a warning if torch has more threads than the process has CPUs: torch counts those of the machine
    even in a container, and threads that wait for each other's core take many times as long."""
    usable = usable_cpus()
    if usable is not None and threads > usable:
        _log.warning(
            "torch runs %d threads, and this process may use %d CPUs: set OMP_NUM_THREADS=%d",
            threads,
            usable,
            usable,
        )


def _quota(group: Path) -> int | None:
    """The group's quota in whole CPUs, at least one; `None` without one."""
    try:
        time, period = (group / "cpu.max").read_text(encoding="ascii").split()
        return max(1, int(time) // int(period))  # "max", no quota: ValueError
    except (OSError, ValueError, ZeroDivisionError):
        return None
