"""The draft's cache of one request."""

from dspark.attention.cache import KVStore


class DraftContext(KVStore):
    """Context keys and values of every draft layer: one row per committed token, from the target's taps.

    A block's own keys and values are written behind `length` and never kept.
    """

    __slots__ = ()
