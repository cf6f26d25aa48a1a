"""Attention over cached keys and values. One function, `attend`, is the place for a kernel."""

from dspark.attention.cache import KVStore
from dspark.attention.cached import CachedAttention
from dspark.attention.functional import attend

__all__ = ["CachedAttention", "KVStore", "attend"]
