"""The core's attention of a whole batch equals torch's, request by request."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import pytest
import torch
from torch import Tensor

from dspark import RequestError, _core
from dspark.attention import CachedAttention, KVStore, cached
from dspark.attention.cached import FEW_ROWS
from dspark.attention.workers import parallel_region

LAYERS, KEY_HEADS, QUERY_HEADS, SIZE = 2, 2, 6, 32
WIDE = 17
"""Rows of 16 drafted tokens and their anchor."""

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 4e-2}


def stores(lengths: Sequence[int], dtype: torch.dtype, size: int = SIZE) -> list[KVStore]:
    torch.manual_seed(5)
    made = []
    for length in lengths:
        store = KVStore(LAYERS, KEY_HEADS, size, dtype, torch.device("cpu"))
        store.require(length + 1)
        store.data.normal_()
        store.length = length
        made.append(store)
    return made


def attended(
    lengths: Sequence[int],
    rows: Sequence[int],
    heads: Tensor,
    windows: list[int | None],
    causal: bool,
    rule: str,
) -> tuple[list[Tensor], list[Tensor], bool]:
    """Each layer's output, the caches afterwards, and whether the core did it."""
    segments = list(zip(stores(lengths, heads.dtype, heads.shape[-1]), rows, strict=True))
    attention = CachedAttention(segments, QUERY_HEADS, windows, causal, rule)
    outputs = [attention.layer(layer, heads) for layer in range(LAYERS)]
    kept = [store.data[:, :, : store.length + n] for store, n in segments]
    return outputs, kept, attention._together is not None


def compare(dtype: torch.dtype, heads: Tensor, *how: object) -> None:
    lengths, rows = (0, 5, 130, 64, 70), (3, 1, 8, 7, WIDE)
    with torch.inference_mode():
        found, caches, by_core = attended(lengths, rows, heads, *how)  # type: ignore[arg-type]
        with mock.patch.object(cached, "_suits_core", return_value=False):
            expected, others, by_torch = attended(lengths, rows, heads, *how)  # type: ignore[arg-type]
    assert by_core and not by_torch
    for one, other in zip(found, expected, strict=True):
        assert (one.float() - other.float()).abs().max() < TOLERANCE[dtype]
    for cache, other in zip(caches, others, strict=True):
        assert torch.equal(cache, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rule", ["sliding", "anchored", "anchored, bidirectional"])
@pytest.mark.parametrize("windows", [[None, None], [None, 4], [40, 9]])
def test_equals_torch(dtype: torch.dtype, causal: bool, rule: str, windows: list[int | None]) -> None:
    torch.manual_seed(1)
    heads = (0.4 * torch.randn(19 + WIDE, QUERY_HEADS + 2 * KEY_HEADS, SIZE)).to(dtype)
    compare(dtype, heads, windows, causal, rule)


def test_rows_may_be_apart() -> None:
    """As the heads are that a gated attention cuts out of a wider product."""
    torch.manual_seed(2)
    wide = 0.4 * torch.randn(19 + WIDE, QUERY_HEADS + 2 * KEY_HEADS + 5, SIZE)
    for heads in (
        wide[:, : QUERY_HEADS + 2 * KEY_HEADS],
        wide[:, 5:].transpose(1, 2).contiguous().transpose(1, 2),
    ):
        compare(torch.float32, heads, [None, 7], True, "sliding")


def test_what_the_core_cannot_do_is_torchs() -> None:
    for dtype, rows, size in (
        (torch.float64, 1, 32),
        (torch.float16, 1, 32),
        (torch.float32, FEW_ROWS + 1, 32),
        (torch.float32, 1, 24),
    ):
        heads = torch.randn(rows, QUERY_HEADS + 2 * KEY_HEADS, size).to(dtype)
        with torch.inference_mode():
            assert not attended((9,), (rows,), heads, [None, None], True, "sliding")[2]


def test_runs_on_torchs_threads() -> None:
    """A batch large enough to be shared gives the same bits on one thread and on two."""
    if parallel_region() == 0:
        pytest.skip("no OpenMP library was found beside torch")
    torch.manual_seed(3)
    heads = torch.randn(64, QUERY_HEADS + 2 * KEY_HEADS, SIZE)
    lengths, rows = [300] * 8, [8] * 8
    before = torch.get_num_threads()
    outcomes = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            with torch.inference_mode():
                outcomes.append(attended(lengths, rows, heads, [None, None], True, "sliding")[0])
    finally:
        torch.set_num_threads(before)
    for one, two in zip(*outcomes, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("head_dim", "segment"),
    [(24, (64, 8, 4, 1)), (32, (0, 8, 4, 1)), (32, (66, 8, 4, 1)), (32, (64, 8, 8, 1))],
)
def test_refuses_what_does_not_fit(head_dim: int, segment: tuple[int, int, int, int]) -> None:
    with pytest.raises(RequestError, match="attention got 4 heads over 2"):
        _core.Attention("float32", 2, 4, head_dim, [segment], [(True, 0, False)], 0, 1)
    with pytest.raises(RequestError, match="float32 and bfloat16, not float64"):
        _core.Attention("float64", 2, 4, 32, [(64, 8, 4, 1)], [(True, 0, False)], 0, 1)
    with pytest.raises(RequestError, match="no kind of visibility 1"):
        _core.Attention("float32", 2, 4, 32, [], [(True, 0, False)], 0, 1).layer(0, 1, 64, 8, 64)
