"""Targets: the models whose distribution the output follows. Names are imported when used, so reading configs
needs no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspark.target.cache import KVCache
    from dspark.target.config import TargetConfig
    from dspark.target.load import load_target
    from dspark.target.model import TargetModel
    from dspark.target.protocol import Target, TargetCache

__all__ = ["KVCache", "Target", "TargetCache", "TargetConfig", "TargetModel", "load_target"]

_MODULES = {
    "KVCache": "cache",
    "Target": "protocol",
    "TargetCache": "protocol",
    "TargetConfig": "config",
    "TargetModel": "model",
    "load_target": "load",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"dspark.target.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'dspark.target' has no attribute {name!r}")
