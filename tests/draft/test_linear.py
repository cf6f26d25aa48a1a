"""The products of a frozen model equal `nn.Linear`, by whichever of the ways they go."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dspark import RequestError, _core
from dspark.layers import half, linear
from dspark.layers.linear import FusedLinear

SIZES = [(96, (96, 32, 32)), (256, (96,)), (7, (5,)), (576, (576, 192, 192)), (64, (33,))]


def linears(inputs: int, outputs: tuple[int, ...], bias: bool, dtype: torch.dtype) -> list[nn.Linear]:
    torch.manual_seed(inputs)
    return [nn.Linear(inputs, size, bias=bias, dtype=dtype).requires_grad_(False) for size in outputs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_equals_the_linears(inputs: int, outputs: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    parts = linears(inputs, outputs, bias, dtype)
    fused = FusedLinear(parts)
    tolerance = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 5e-2}[dtype]
    with torch.inference_mode():
        for rows in (1, 2, 3, 7, 8, 9, 16, 17, 40):
            x = torch.randn(rows, inputs, dtype=dtype)
            expected = torch.cat([part(x) for part in parts], -1)
            residual = torch.randn_like(expected)
            for given in (x, x.t().contiguous().t(), torch.cat((x, x), -1)[:, :inputs]):
                assert (fused(given) - expected).abs().max() <= tolerance
                assert (fused.add(given, residual) - expected - residual).abs().max() <= 2 * tolerance


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    """Of the core's product, bit for bit: what lets a verify pass equal single steps."""
    (part,) = linears(96, (160,), False, torch.float32)
    product = _core.SmallProduct(part.weight)

    def run(x: Tensor) -> Tensor:
        out = torch.full((x.shape[0], 160), torch.nan)
        product.run(x.data_ptr(), x.shape[0], 0, out.data_ptr())
        return out

    x = torch.randn(23, 96)
    whole = run(x)
    for start, stop in ((0, 1), (3, 11), (5, 22)):
        assert torch.equal(run(x[start:stop].contiguous()), whole[start:stop])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(7, (5,)), (96, (96, 32, 32)), (1500, (70, 700))])
def test_products_in_16_bits(
    inputs: int, outputs: tuple[int, ...], bias: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums in float32, rounded once, by the core and beyond `FEW_ROWS` with a widened weight."""
    monkeypatch.setattr(linear, "serves", lambda *_: True)
    monkeypatch.setattr(half, "PIECE", 1 << 16)
    parts = linears(inputs, outputs, bias, dtype)
    fused = FusedLinear(parts)
    assert fused.half is not None
    ulp = {torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    with torch.inference_mode():
        for rows in (1, 6, 8, half.FEW_ROWS, half.FEW_ROWS + 1):
            x = torch.randn(rows, inputs, dtype=dtype)
            expected = torch.cat([part.double()(x.double()) for part in parts], -1)
            residual = torch.randn(rows, sum(outputs), dtype=dtype)
            before = residual.clone()
            for given in (x, torch.cat((x, x), -1)[:, :inputs]):
                found, added = fused(given), fused.add(given, residual)
                assert found.dtype == added.dtype == dtype
                assert ((found - expected).abs() <= expected.abs() * ulp + 1e-5).all()
                # With a bias, the residual is rounded with it first.
                start = (residual + fused.bias if bias else residual).double()
                exact = expected - (fused.bias.double() if bias else 0.0) + start
                assert ((added - exact).abs() <= exact.abs() * ulp + 1e-5).all()
            assert torch.equal(residual, before)


@pytest.mark.parametrize("rows", [1, 6, 40, 127])
def test_in_16_bits_a_row_does_not_depend_on_the_rows_beside_it(rows: int) -> None:
    product = half.HalfProduct(torch.randn(300, 1100).bfloat16())
    x = torch.randn(half.FEW_ROWS, 1100).bfloat16()
    assert torch.equal(product(x[:rows]), product(x)[:rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_do_not_fit_are_refused_before_the_core_reads_them(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "serves", lambda dtype, _: dtype == torch.bfloat16)
    product = FusedLinear(linears(64, (32,), False, dtype))
    assert product.half is not None or product.small is not None
    other = torch.float64
    with torch.inference_mode():
        for x in (torch.zeros(2, 8, dtype=dtype), torch.zeros(2, 64, dtype=other), torch.zeros(2, 3, 64)):
            with pytest.raises(RequestError, match="expected rows of 64 numbers"):
                product(x)
        for start in (torch.zeros(2, 32, dtype=other), *(torch.zeros(n, 32, dtype=dtype) for n in (1, 3))):
            with pytest.raises(RequestError, match=r"to start from \[2, 32\] in"):
                product.add(torch.zeros(2, 64, dtype=dtype), start)
        if product.half is not None:
            wide = torch.zeros(half.FEW_ROWS + 1, 64, dtype=dtype)
            with pytest.raises(RequestError, match="to start from"):
                product.add(wide, torch.zeros(1, 32, dtype=dtype))


def test_what_is_no_product_in_16_bits_is_refused() -> None:
    for weight in (torch.zeros(4, 3), torch.zeros(0, 3).half()):
        with pytest.raises(RequestError, match="bfloat16 or float16"):
            _core.HalfProduct(weight, 0)
    product = _core.HalfProduct(torch.zeros(4, 3).half(), 0)
    for addresses in ((0, 1, 0, 64), (64, 1, 0, 0), (65, 1, 0, 64), (64, 1, 3, 64)):
        with pytest.raises(RequestError, match="null or not aligned"):
            product.run(*addresses)


def test_addresses_that_cannot_be_are_refused() -> None:
    product = _core.SmallProduct(torch.zeros(4, 3))
    for addresses in ((0, 1, 0, 64), (64, 1, 0, 0), (66, 1, 0, 64)):
        with pytest.raises(RequestError, match="null or not aligned"):
            product.run(*addresses)
    for weight in (torch.zeros(4, 3, dtype=torch.float64), torch.zeros(0, 3)):
        with pytest.raises(RequestError, match="small product"):
            _core.SmallProduct(weight)
