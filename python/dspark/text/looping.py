"""Finds texts that loop, from the start or from some point on. Small models write them at temperature 0;
every drafter does well on them, and none learns from them."""

from __future__ import annotations

from collections.abc import Sequence

LENGTH = 4
"""Tokens of the n-grams that are counted."""

FEWEST_DISTINCT = 0.5
"""A text loops if less than this share of the n-grams at its end are distinct: roughly, if it says the same
thing there for the third time."""

SHORTEST = 32
"""An end, or a whole answer, of fewer tokens than this is too short to judge."""


def distinct_share(tokens: Sequence[int]) -> float:
    """The smallest share of distinct 4-grams among all, over all ends of the text of 32 tokens or more, the
    whole included. 1 for a shorter text."""
    seen: set[tuple[int, ...]] = set()
    smallest = 1.0
    for start in range(len(tokens) - LENGTH, -1, -1):
        seen.add(tuple(tokens[start : start + LENGTH]))
        length = len(tokens) - start
        if length >= SHORTEST:
            smallest = min(smallest, len(seen) / (length - LENGTH + 1))
    return smallest


def is_looping(tokens: Sequence[int]) -> bool:
    """Whether less than half of the 4-grams are distinct, in the text or in some end of 32 tokens or more."""
    return distinct_share(tokens) < FEWEST_DISTINCT
