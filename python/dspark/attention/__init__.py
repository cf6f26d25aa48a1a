"""Attention over cached keys and values: by kernel, by the core, or by torch (`choice`)."""

from dspark.attention.cache import KVStore
from dspark.attention.cached import CachedAttention
from dspark.attention.choice import AttentionKernel, attention_kernel
from dspark.attention.functional import attend
from dspark.attention.visible import Visible

__all__ = ["AttentionKernel", "CachedAttention", "KVStore", "Visible", "attend", "attention_kernel"]
