"""The control groups (v2) that a process is in."""

from __future__ import annotations

from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


def own_groups() -> list[Path]:
    """This process's group and its ancestors. A container sees its own group as the root; a systemd service
    has one further down."""
    try:
        lines = _OWN_CGROUP.read_text(encoding="utf-8").splitlines()
        own = next(line.removeprefix("0::") for line in lines if line.startswith("0::"))
    except (OSError, ValueError, StopIteration):
        own = "/"
    place = _CGROUP / own.strip("/")
    return [group for group in (place, *place.parents) if group.is_relative_to(_CGROUP)]
