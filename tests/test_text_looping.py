"""What counts as a text that repeats itself."""

from __future__ import annotations

from dspark.text.looping import distinct_share, is_looping


def test_looping():
    assert is_looping([1, 2, 3] * 20) and not is_looping(list(range(60)))
    assert not is_looping([1, 2, 3] * 5)  # too short to say
    half = [*range(40), *[7] * 30]  # 40 distinct 4-grams of 67
    assert not is_looping(half) and is_looping([*half, *[7] * 30])


def test_distinct_share_by_hand():
    assert distinct_share([1, 2, 3]) == 1.0 == distinct_share(range(9))
    assert distinct_share([7] * 8) == 1 / 5
    assert distinct_share([1, 2, 1, 2, 1, 2]) == 2 / 3
