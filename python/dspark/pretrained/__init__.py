"""Models that come with the package, or are fetched by name."""

from dspark.pretrained.cache import cache_root
from dspark.pretrained.names import resolve

__all__ = ["cache_root", "resolve"]
