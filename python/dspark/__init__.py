"""Lossless speculative decoding with DSpark drafts.

    from dspark import DSparkDecoder, SamplingParams

    with DSparkDecoder.from_pretrained(target, draft) as decoder:
        print(decoder.generate("Once", SamplingParams(max_tokens=64, temperature=0.0)).text)

Importing this package is cheap: torch is imported when a model is loaded.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dspark._core import __version__
from dspark.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    DSparkError,
    KernelError,
    NumericsError,
    QueueFullError,
    RequestError,
)
from dspark.result import GenerationResult, Round, StreamPiece, Timing
from dspark.sampling import SamplingParams

if TYPE_CHECKING:
    from dspark import core, draft
    from dspark.decoder import DSparkDecoder

__all__ = [
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "DSparkDecoder",
    "DSparkError",
    "GenerationResult",
    "KernelError",
    "NumericsError",
    "QueueFullError",
    "RequestError",
    "Round",
    "SamplingParams",
    "StreamPiece",
    "Timing",
    "__version__",
    "core",
    "draft",
]

if not TYPE_CHECKING:  # else type checkers would accept any name of this module

    def __getattr__(name: str) -> Any:
        if name == "DSparkDecoder":
            return import_module("dspark.decoder").DSparkDecoder
        if name in ("core", "draft"):
            return import_module(f"dspark.{name}")
        raise AttributeError(f"module 'dspark' has no attribute {name!r}")
