"""Attention over cached keys and values. One function, `attend`, is the place for a kernel."""

from dspark.attention.cache import KVStore
from dspark.attention.cached import CachedAttention
from dspark.attention.functional import attend
from dspark.attention.visible import Visible

__all__ = ["CachedAttention", "KVStore", "Visible", "attend"]
