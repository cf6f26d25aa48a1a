"""Devices and dtypes of models, as users name them."""

from __future__ import annotations

import logging
import re

import torch

from dspark.errors import ConfigError

_log = logging.getLogger("dspark")

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}


def parse_device(name: str) -> torch.device:
    """Parses a device: "auto" is a GPU if torch sees one, else the CPU; "cuda" is the thread's current GPU.

    Raises `ConfigError`.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not isinstance(name, str) or not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ConfigError(f'device must be "auto", "cpu", "cuda" or "cuda:N", not {name!r}')
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError('device "cuda" was asked for, but torch sees no GPU')
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def parse_dtype(name: str) -> torch.dtype | str:
    """A torch dtype, or "auto" for the checkpoint's; raises `ConfigError`."""
    if name == "auto":
        return name
    if name not in DTYPES:
        raise ConfigError(f'dtype must be "auto" or one of {", ".join(DTYPES)}, not {name!r}')
    return DTYPES[name]


def has_fast_products(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products in the 16-bit `dtype` are faster on `device` than in float32."""
    if device.type != "cpu":
        return True
    check = getattr(torch.cpu, "_is_avx512_bf16_supported", None)  # private: absent means no
    return dtype == torch.bfloat16 and check is not None and bool(check())


def multiplies_in_software(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch's products in a 16-bit `dtype` are many times slower on `device` than in float32, because
    neither the CPU nor oneDNN supports it (bfloat16 with AVX2 alone: 64 rows take four times as long, 2,000
    ten times)."""
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}.get(
        dtype
    )
    if device.type != "cpu" or name is None:
        return False
    check = getattr(torch.ops.mkldnn, name, None)  # private: absent means no
    return check is None or not check()


def warn_if_slow(what: str, dtype: torch.dtype, device: torch.device) -> None:
    """Logs a warning about `what` if `device` multiplies `dtype` in software."""
    if multiplies_in_software(dtype, device):
        _log.warning(
            "%s: this CPU multiplies %s slowly: float32 is several times as fast",
            what,
            str(dtype).removeprefix("torch."),
        )
