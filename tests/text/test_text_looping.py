"""What counts as a text that repeats itself."""

from __future__ import annotations

import pytest

from dspark.text import Tokenizer
from dspark.text.looping import FEWEST_DISTINCT, distinct_share, is_looping
from places import ROOT


def test_looping():
    assert is_looping([1, 2, 3] * 20) and not is_looping(list(range(60)))
    assert not is_looping([1, 2, 3] * 5)  # too short to say
    assert not is_looping([*range(100), *[7] * 15]) and is_looping([*range(100), *[7] * 32])


@pytest.mark.parametrize("period", [1, 7, 14, 40])
def test_an_answer_that_loops_in_its_second_half_loops(period):
    loop = [*range(1000, 1000 + period)] * (200 // period + 1)
    assert is_looping([*range(200), *loop[:200]])
    # Twice the same is no circle yet, and one that ends is not at the end.
    assert not is_looping([*range(200), *[*range(1000, 1032)] * 2])
    assert not is_looping([*loop[:100], *range(110)])


def test_distinct_share_by_hand():
    assert distinct_share([1, 2, 3]) == 1.0 == distinct_share(range(90)) == distinct_share([7] * 31)
    assert distinct_share([7] * 32) == 1 / 29
    assert distinct_share([1, 2] * 20) == 2 / 37  # of the whole; of its last 32 tokens 2 / 29
    # The last 32 alone: one token more at the front adds a new 4-gram each time.
    assert distinct_share([*range(90), *[7] * 32]) == 1 / 29


TURNED = (
    "After the meeting we wrote a letter to the owner, in which we asked for a visit. I have been talking "
    "to the authorities about it. I have been talking to the authorities again, and I have been talking to "
    "the authorities again. I have been talking to the authorities again, and I have been talking to the"
)
"""In short, what SmolLM2-135M does: it writes for a while and then goes in circles."""


def test_the_bound_tells_real_text_from_a_model_s_circles():
    """Wherever an answer of 256 tokens might be cut out of prose or of program text, it would hardly ever be
    taken for a loop: lines of tables, or the same call many times."""
    tokenizer = Tokenizer.from_directory(ROOT / "python/dspark/pretrained/tiny/target")
    kinds = {
        "prose": [ROOT / "README.md", ROOT / "LICENSE", *sorted((ROOT / "docs").glob("*.md"))],
        "code": sorted((ROOT / "python/dspark/train").rglob("*.py")),
    }
    for kind, files in kinds.items():
        texts = [tokenizer.encode(file.read_text(encoding="utf-8")) for file in files]
        shares = [distinct_share(ids[end - 256 : end]) for ids in texts for end in range(256, len(ids), 128)]
        assert len(shares) > 200
        assert sum(share < FEWEST_DISTINCT for share in shares) < 0.01 * len(shares), kind
    words = TURNED.split()
    ids = [words.index(word) for word in words]
    grams = [tuple(ids[i : i + 4]) for i in range(len(ids) - 3)]
    assert len(set(grams)) > FEWEST_DISTINCT * len(grams)  # of the whole
    assert is_looping(ids)
