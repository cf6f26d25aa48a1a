"""torch's attention over few and many rows: what each row sees, and the masks that say so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dspark.attention import functional
from dspark.attention.functional import ROWS_AT_ONCE, attend
from dspark.attention.visible import Visible

CPU = torch.device("cpu")
GROUPS, KEY_HEADS, SIZE = 3, 2, 16
SEEN = [
    Visible(1, 1, True),
    Visible(1, 40, True),
    Visible(1, 40, True, 9),
    Visible(1, 40, True, 9, anchored=True),
    Visible(3, 3, True),
    Visible(7, 7, True, 3),
    Visible(7, 7, True, 7),
    Visible(7, 7, True, 3, anchored=True),
    Visible(7, 50, True),
    Visible(7, 50, True, 12),
    Visible(7, 50, True, 3),
    Visible(7, 50, True, 12, anchored=True),
    Visible(7, 50, False),
    Visible(7, 50, False, 12, anchored=True),
    Visible(40, 1100, True, 33),
    Visible(600, 1400, True, 5),  # the first keys that some rows score are all hidden from them
    Visible(128, 1301, True).piece(5, 100),
    Visible(ROWS_AT_ONCE + 7, ROWS_AT_ONCE + 7, True),
    Visible(ROWS_AT_ONCE + 7, ROWS_AT_ONCE + 90, True, 60),
    Visible(ROWS_AT_ONCE + 7, ROWS_AT_ONCE + 90, True, 60, anchored=True),
]


def expected(queries: Tensor, keys: Tensor, values: Tensor, seen: Visible) -> Tensor:
    """Row by row, from what `Visible` says in words."""
    rows = []
    for i in range(seen.rows):
        own = seen.total - seen.rows + i
        end = own + 1 if seen.causal else seen.total
        start = 0
        if seen.window is not None:
            start = seen.total - seen.rows - seen.window if seen.anchored else own + 1 - seen.window
        visible = slice(max(0, start) - seen.first, end - seen.first)
        k, v = (x[:, visible].double().repeat_interleave(GROUPS, 0) for x in (keys, values))
        weights = torch.softmax(k @ queries[i].double()[:, :, None], 1)
        rows.append((weights * v).sum(1).flatten())
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("seen", SEEN, ids=lambda s: f"{s.rows} of {s.total}, {s.window}, {s.anchored}")
def test_every_row_sees_what_it_should(seen: Visible, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    count = seen.total - seen.first
    queries = torch.randn(seen.rows, GROUPS * KEY_HEADS, SIZE).to(dtype)
    keys, values = torch.randn(2, KEY_HEADS, count, SIZE).to(dtype)
    mask = seen.mask(dtype, CPU)
    found = attend(queries, keys, values, seen, mask)
    allowed = {torch.float64: 1e-12, torch.float32: 5e-6, torch.float16: 5e-3, torch.bfloat16: 4e-2}
    assert (found.double() - expected(queries, keys, values, seen)).abs().max() < allowed[dtype]


def test_a_mask_has_an_allocation_of_its_own() -> None:
    """A GPU's fused attention reads masks 16 bytes at a time, so a part of another tensor may not do."""
    for seen in SEEN:
        mask = seen.mask(torch.bfloat16, CPU)
        assert mask is None or mask.shape == (seen.rows, seen.total - seen.first)
        assert mask is None or (mask.storage_offset() == 0 and mask.is_contiguous())


def test_where_order_alone_hides_keys_there_is_no_mask() -> None:
    assert Visible(7, 7, True).mask(torch.float32, CPU) is None
    assert Visible(1, 9, True, 4).mask(torch.float32, CPU) is None
    assert Visible(7, 9, False).mask(torch.float32, CPU) is None
    assert Visible(7, 9, True).mask(torch.float32, CPU) is not None


def test_on_a_cpu_the_choice_of_backends_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It belongs to the process, whose other threads may be attending too."""
    monkeypatch.setattr(functional, "sdpa_kernel", lambda _: pytest.fail("set the process's backends"))
    attend(torch.randn(3, 2, 16), *torch.randn(2, 2, 3, 16), Visible(3, 3, True), None)
