"""Attention over cached keys and values: by kernel, by the core, or by torch (`choice`)."""

from dspark.attention.cache import KVStore
from dspark.attention.cached import CachedAttention
from dspark.attention.choice import AttentionChoice, choose_attention
from dspark.attention.functional import attend
from dspark.attention.visible import Visible

__all__ = ["AttentionChoice", "CachedAttention", "KVStore", "Visible", "attend", "choose_attention"]
