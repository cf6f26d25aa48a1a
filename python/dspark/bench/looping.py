"""Answers that repeat themselves: easy to predict, they flatter every draft."""

from __future__ import annotations

from collections.abc import Sequence

REPEATS = 3
SHORTEST = 12
"""Tokens of repetition at least: three times the same short word is no loop."""


def is_looping(tokens: Sequence[int]) -> bool:
    """Whether a text ends in the same piece three times or more, over 12 tokens or more."""
    for period in range(1, len(tokens) // REPEATS + 1):
        tail = max(REPEATS * period, SHORTEST)
        if tail > len(tokens):
            continue
        end = tokens[len(tokens) - tail :]
        if all(a == b for a, b in zip(end, end[period:], strict=False)):
            return True
    return False
