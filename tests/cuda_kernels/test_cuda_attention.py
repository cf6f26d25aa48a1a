"""The attention kernel, emulated, equals attention by its definition in float64."""

from __future__ import annotations

from random import Random

import pytest
import torch

import cuda_host
from attention_cases import Case
from cuda_host import Launcher

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
TOLERANCE = {F32: 1e-5, F16: 3e-3, BF16: 2e-2}
"""Of the weighted mean of |values|. Half precision: weights and the output are rounded once each."""

DTYPES = pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["f32", "f16", "bf16"])


@pytest.fixture(scope="module")
def host() -> Launcher:
    return cuda_host.library()


def check(host: Launcher, case: Case, order: Random | None = None) -> None:
    case.run(host, order)
    assert case.largest_error() < TOLERANCE[case.dtype]
    case.check_caches()


@DTYPES
@pytest.mark.parametrize("size", [16, 64, 128, 256])
@pytest.mark.parametrize("rows", [1, 7, 8, 16, 17])
def test_rows_and_head_sizes(host: Launcher, dtype: torch.dtype, size: int, rows: int) -> None:
    """Keys 0, 1, 17 and around a page's border, in one ragged batch with an empty request."""
    requests = [(0, rows), (1, rows), (33, 0), (17, 1), (30, rows), (31, rows), (32, rows)]
    check(host, Case(requests, dtype, 1, 3, size, page=16, seed=rows))


@pytest.mark.parametrize(("queries", "keys"), [(24, 4), (32, 8), (9, 3), (8, 8), (16, 1)])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
def test_ratios_of_heads(host: Launcher, dtype: torch.dtype, queries: int, keys: int) -> None:
    """16 query heads for one key head make 32 query tiles of 16 queries: more than a block takes."""
    check(host, Case([(20, 32), (40, 3)], dtype, keys, queries // keys, 64))


@pytest.mark.parametrize(
    ("causal", "window", "anchored"),
    [(True, 0, False), (False, 0, False), (True, 1, False), (True, 5, False), (True, 30, False)]
    + [(causal, window, True) for causal in (True, False) for window in (1, 20, 500)],
)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
def test_visibility(host: Launcher, dtype: torch.dtype, causal: bool, window: int, anchored: bool) -> None:
    requests = [(0, 7), (5, 8), (90, 7), (130, 1)]
    check(host, Case(requests, dtype, causal=causal, window=window, anchored=anchored, chunk=32, page=8))


@DTYPES
@pytest.mark.parametrize("page", [1, 4, 64, None])
def test_pages_in_any_order(host: Launcher, dtype: torch.dtype, page: int | None) -> None:
    check(host, Case([(64, 4), (63, 2), (129, 5)], dtype, page=page, chunk=1000, seed=3))


@DTYPES
@pytest.mark.parametrize("size", [16, 64, 128, 256])
def test_chunks_merge_in_any_order(host: Launcher, dtype: torch.dtype, size: int) -> None:
    found = []
    for seed in range(3):
        case = Case([(150, 8), (9, 1), (75, 2)], dtype, 2, 3, size, chunk=32, window=100)
        check(host, case, Random(seed))
        found.append(case.out)
    for other in found[1:]:
        assert (other - found[0]).abs().max() < 4 * TOLERANCE[dtype]


def test_a_row_does_not_depend_on_those_beside_it(host: Launcher) -> None:
    """Bit for bit, where the keys are split alike: rows of a request, and requests of a batch."""
    many = Case([(40, 8), (70, 6)], BF16, page=8)
    check(host, many)
    few = Case([(40, 8), (70, 6)], BF16, page=8)
    few.requests = [(40, 5), (70, 0)]
    few.out.fill_(0)
    few.run(host)
    assert torch.equal(few.out[:5], many.out[:5]) and not few.out[5:].any()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("chunk", [32, 1000])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_a_number_stays_so(host: Launcher, dtype: torch.dtype, chunk: int, bad: float) -> None:
    """A bad key makes the rows that see it bad, and no others."""
    case = Case([(70, 8), (5, 2)], dtype, 1, 2, chunk=chunk, window=40)
    case.heads[:, : case.query_heads, 0] = (
        0.5  # so that no product with the bad key is -inf, which is no weight
    )
    case.pools[0][1][0, 36] = bad  # seen by rows 0 .. 5: row i sees the keys from 31 + i on
    case.run(host)
    assert case.out[:6].isnan().all() and case.out[6:].isfinite().all()


def test_large_scores(host: Launcher) -> None:
    """No weight overflows; scores of a thousand are right to some 1e-4, and so are weights."""
    case = Case([(100, 8)], F32, chunk=32)
    case.heads[:, : case.query_heads] *= 300
    case.run(host)
    assert case.largest_error() < 1e-3
