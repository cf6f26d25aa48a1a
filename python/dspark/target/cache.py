"""The target's cache of one request."""

from dspark.attention.cache import KVStore


class KVCache(KVStore):
    """Keys and values of one request in every layer of the target; see `KVStore` for what a rollback is."""

    __slots__ = ()

    @property
    def state_bytes(self) -> int:
        """Zero: all memory goes by positions."""
        return 0

    def mark(self) -> None:
        """Does nothing: the cache can be forked at any length."""
