"""Texts that go round in circles, from the start or from somewhere on. Small models do at temperature 0;
every drafter shines on them, and none learns from them."""

from __future__ import annotations

from collections.abc import Sequence

LENGTH = 4
"""Tokens of the n-grams that are counted."""

FEWEST_DISTINCT = 0.5
"""A text loops if less than this share of the n-grams at its end are different ones: roughly, if it says the
same thing there a third time."""

SHORTEST = 32
"""Tokens below which an end, or a whole answer, is too short to say."""


def distinct_share(tokens: Sequence[int]) -> float:
    """Distinct 4-grams over all 4-grams, in the end of the text where that is smallest: of its ends of 32
    tokens or more, the whole included. 1 for a shorter text."""
    seen: set[tuple[int, ...]] = set()
    smallest = 1.0
    for start in range(len(tokens) - LENGTH, -1, -1):
        seen.add(tuple(tokens[start : start + LENGTH]))
        length = len(tokens) - start
        if length >= SHORTEST:
            smallest = min(smallest, len(seen) / (length - LENGTH + 1))
    return smallest


def is_looping(tokens: Sequence[int]) -> bool:
    """Whether less than half of the 4-grams are distinct, in the text or an end of 32 tokens or more."""
    return distinct_share(tokens) < FEWEST_DISTINCT
