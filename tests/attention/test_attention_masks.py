"""Masks for fused attention, which a GPU reads 16 bytes at a time, beside those that the CPU adds."""

from __future__ import annotations

import pytest
import torch

from dspark.attention import functional
from dspark.attention.visible import Visible

CPU = torch.device("cpu")
GROUPS, KEY_HEADS, SIZE = 3, 2, 16
SEEN = [
    Visible(1, 40, True, 9),
    Visible(3, 3, True),
    Visible(7, 50, True),
    Visible(7, 50, True, 12),
    Visible(7, 50, True, 3),
    Visible(7, 50, True, 12, anchored=True),
    Visible(40, 1100, True, 33),
    Visible(128, 1301, True).piece(5, 100),
    Visible(7, 50, False),
]


@pytest.mark.parametrize("seen", SEEN, ids=lambda seen: f"{seen.rows} of {seen.total}, {seen.window}")
def test_fused_attention_equals_two_products(seen: Visible) -> None:
    torch.manual_seed(3)
    keys = seen.total - seen.first
    queries = torch.randn(seen.rows, GROUPS * KEY_HEADS, SIZE)
    keys_t, values = torch.randn(KEY_HEADS, SIZE, keys), torch.randn(KEY_HEADS, keys, SIZE)
    mask = seen.mask(GROUPS, torch.float32, CPU)
    expected = functional._two_products(queries, keys_t, values, mask)
    own = None if mask is None else seen.fresh_mask(torch.float32, CPU)
    if mask is not None and own is not None:
        assert torch.equal(own.repeat_interleave(GROUPS, 0), mask)
        assert own.is_contiguous() and own.storage_offset() == 0
        assert own.untyped_storage().nbytes() == own.numel() * 4
    found = functional._fused(queries, keys_t, values, own)
    assert torch.allclose(found, expected, atol=2e-6)


def test_off_the_cpu_a_mask_has_a_row_for_each_row() -> None:
    """Not one for each query head, and is not kept."""
    meta = torch.device("meta")
    seen = Visible(7, 1050, True)
    masks = [seen.mask(GROUPS, torch.bfloat16, meta) for _ in range(2)]
    assert masks[0] is not masks[1]
    for mask in masks:
        assert mask is not None and mask.shape == (7, 1050) and mask.storage_offset() == 0
    assert Visible(7, 50, False).mask(GROUPS, torch.bfloat16, meta) is None
