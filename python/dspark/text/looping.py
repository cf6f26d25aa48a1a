"""Texts that go round in circles. Small models do at temperature 0; every drafter shines on them, and none
learns from them."""

from __future__ import annotations

from collections.abc import Sequence

LENGTH = 4
"""Tokens of the n-grams that are counted."""

FEWEST_DISTINCT = 0.5
"""A text loops if less than this share of its n-grams are different ones."""

SHORTEST = 32
"""Tokens below which an answer is too short to say."""


def distinct_share(tokens: Sequence[int]) -> float:
    """Distinct 4-grams over all 4-grams; 1 for a text without any."""
    grams = [tuple(tokens[i : i + LENGTH]) for i in range(len(tokens) - LENGTH + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def is_looping(tokens: Sequence[int]) -> bool:
    """Whether less than half of the 4-grams of a text of 32 tokens or more are distinct."""
    return len(tokens) >= SHORTEST and distinct_share(tokens) < FEWEST_DISTINCT
