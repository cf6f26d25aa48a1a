"""Answers that go round in circles. Small models do at temperature 0, and every drafter shines on them."""

from __future__ import annotations

from collections.abc import Sequence

LENGTH = 4
"""Tokens of the n-grams that are counted."""

FEWEST_DISTINCT = 0.5
"""An answer loops if less than this share of its n-grams are different ones."""

SHORTEST = 32
"""Tokens below which an answer is too short to say."""


def is_looping(tokens: Sequence[int]) -> bool:
    """Whether less than half of the answer's 4-grams are distinct."""
    if len(tokens) < SHORTEST:
        return False
    grams = [tuple(tokens[i : i + LENGTH]) for i in range(len(tokens) - LENGTH + 1)]
    return len(set(grams)) < FEWEST_DISTINCT * len(grams)
