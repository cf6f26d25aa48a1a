"""Where models are, and in what precision, as a user says it."""

from __future__ import annotations

import re

import torch

from dspark.errors import ConfigError

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}


def parse_device(name: str) -> torch.device:
    """ "auto" is a GPU if torch sees one, else the CPU; a GPU without a number is the thread's current one.

    Raises `ConfigError`.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not isinstance(name, str) or not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ConfigError(f'device must be "auto", "cpu" or "cuda", not {name!r}')
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError('device "cuda" was asked for, and torch sees no GPU')
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
