"""The CUDA kernels: whether a device has them, and why not.

`choose` decides once per device. On a GPU the kernels are compiled on first use by the NVRTC that ships with
torch; a failure gives one `KernelWarning` with the reason, and torch's operations take over.
"""

from dspark.kernels.choice import (
    ROLES,
    Choice,
    KernelWarning,
    choose,
    prepare,
    stream,
)
from dspark.kernels.nvrtc import find_nvrtc, kernel_cache

__all__ = [
    "ROLES",
    "Choice",
    "KernelWarning",
    "choose",
    "find_nvrtc",
    "kernel_cache",
    "prepare",
    "stream",
]
