"""The name of the CPU or GPU that computes."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from pathlib import Path

import torch

_NAMES = ("model name", "cpu model", "uarch", "cpu")
"""Keys of /proc/cpuinfo that name a model: x86, MIPS, RISC-V, POWER."""

_CORES = ("CPU implementer", "CPU part")
"""What Arm has instead: numbers, listed for each core."""


def device_name(device: torch.device) -> str:
    """The model of a CPU or GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu()


@cache
def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    named = named_in(info.read_text(encoding="utf-8")) if info.is_file() else _named_by_macos()
    return named or platform.processor() or platform.machine()


def named_in(cpuinfo: str) -> str:
    """The CPU's name according to the text of /proc/cpuinfo; empty if nothing there names it."""
    parted = (line.partition(":") for line in cpuinfo.splitlines())
    pairs = [(key.strip(), value.strip()) for key, _, value in parted]
    named = [value for name in _NAMES for key, value in pairs if key == name]
    # Cores of different kinds have different numbers.
    parts = dict.fromkeys(f"{key} {value}" for key, value in pairs if key in _CORES)
    return named[0] if named else ", ".join(parts)


def _named_by_macos() -> str:
    try:
        asked = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
