"""The products of a frozen model equal `nn.Linear`, by whichever of the three ways they go."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dspark import RequestError, _core
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
    product = _core.Product(part.weight)

    def run(x: Tensor) -> Tensor:
        out = torch.full((x.shape[0], 160), torch.nan)
        product.run(x.data_ptr(), x.shape[0], 0, out.data_ptr())
        return out

    x = torch.randn(23, 96)
    whole = run(x)
    for start, stop in ((0, 1), (3, 11), (5, 22)):
        assert torch.equal(run(x[start:stop].contiguous()), whole[start:stop])


def test_addresses_that_cannot_be_are_refused() -> None:
    product = _core.Product(torch.zeros(4, 3))
    for addresses in ((0, 1, 0, 64), (64, 1, 0, 0), (66, 1, 0, 64)):
        with pytest.raises(RequestError, match="null or not aligned"):
            product.run(*addresses)
    for weight in (torch.zeros(4, 3, dtype=torch.float64), torch.zeros(0, 3)):
        with pytest.raises(RequestError, match="small product"):
            _core.Product(weight)
