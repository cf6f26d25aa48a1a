"""Targets: the models whose distribution the output follows."""

from dspark.target.cache import KVCache
from dspark.target.config import TargetConfig
from dspark.target.load import load_target
from dspark.target.model import TargetModel

__all__ = ["KVCache", "TargetConfig", "TargetModel", "load_target"]
