"""The target's cache of one request."""

from dspark.attention.cache import KVStore


class KVCache(KVStore):
    """Keys and values of one request in every layer of the target; see `KVStore` for what a rollback is."""

    __slots__ = ()

    @property
    def state_bytes(self) -> int:
        """None: there are only positions."""
        return 0

    def mark(self) -> None:
        """Nothing to remember: it can be forked at any length."""
