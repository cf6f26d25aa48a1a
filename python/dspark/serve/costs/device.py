"""The name of what computes."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import torch


def device_name(device: torch.device) -> str:
    """The model of a CPU or GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu()


@cache
def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
