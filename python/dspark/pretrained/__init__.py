"""Models that come with the package, or are fetched by name."""

from dspark.pretrained.cache import cache_root
from dspark.pretrained.names import is_hub_id, resolve

__all__ = ["cache_root", "is_hub_id", "resolve"]
