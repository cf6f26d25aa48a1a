"""A random load."""

from __future__ import annotations

import time

from dspark import DSparkDecoder


def settle(decoder: DSparkDecoder) -> None:
    """Waits until nothing runs or waits."""
    for _ in range(3000):
        stats = decoder.stats()
        if stats["running"] == stats["queued"] == 0:
            return
        time.sleep(0.01)
    raise AssertionError(f"the decoder does not come to rest: {decoder.stats()}")
