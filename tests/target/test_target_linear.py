"""Fused products: stacked, scaled, with a residual, packed for oneDNN or not, always the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dspark.layers import linear as fused
from dspark.layers.linear import FusedLinear
from dspark.layers.norm import FrozenNorm, RMSNorm
from dspark.target import load_target
from model_zoo import VOCAB, write_target

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}


def linears(dtype: torch.dtype, inputs: int, *outputs: int, bias: bool = False) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(inputs, rows, bias=bias).to(dtype).requires_grad_(False) for rows in outputs]


def by_hand(parts: list[nn.Linear], x: Tensor) -> Tensor:
    return torch.cat([part.double()(x.double()) for part in parts], -1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", [32, 512], ids=["small", "packable"])
@pytest.mark.parametrize("rows", [1, 8, 33])
@torch.inference_mode()
def test_a_fused_product_is_the_products_side_by_side(
    dtype: torch.dtype, bias: bool, size: int, rows: int
) -> None:
    parts = linears(dtype, size, size, size // 2, bias=bias)
    product = FusedLinear(parts)
    x = torch.randn(rows, size, dtype=dtype)
    residual = torch.randn(rows, size + size // 2, dtype=dtype)
    expected = by_hand(parts, x)
    assert (product(x) - expected).abs().max() < TOLERANCE[dtype]
    before = residual.clone()
    assert (product.add(x, residual) - (before.double() + expected)).abs().max() < TOLERANCE[dtype]
    assert torch.equal(residual, before), "the residual may be a tap: it is left alone"


def test_biases_of_some_only() -> None:
    with torch.inference_mode():
        parts = linears(torch.float64, 8, 4, bias=True) + linears(torch.float64, 8, 4)
        x = torch.randn(3, 8, dtype=torch.float64)
        assert (FusedLinear(parts)(x) - by_hand(parts, x)).abs().max() < 1e-12


def test_packing_happens_where_it_pays_and_only_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.inference_mode():
        big = linears(torch.float32, 512, 512)
        assert FusedLinear(linears(torch.float32, 96, 512)).packed is None
        assert FusedLinear(linears(torch.float64, 512, 512)).packed is None
        x = torch.randn(8, 512)
        if (packed := FusedLinear(big)).packed is not None:
            monkeypatch.setattr(fused, "_reorder", None)  # a torch without these operations
            plain = FusedLinear(big)
            assert plain.packed is None
            assert (plain(x) - packed(x)).abs().max() < 1e-5
            assert (plain.add(x, x) - packed.add(x, x)).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_norm_in_few_operations(dtype: torch.dtype) -> None:
    norm = RMSNorm(24, 1e-5).requires_grad_(False).to(dtype)
    norm.weight.copy_(1 + 0.5 * torch.randn(24))
    x = torch.randn(5, 24, dtype=dtype) * torch.tensor([1e-6, 1e-3, 1.0, 1e3, 0.0], dtype=dtype)[:, None]
    with torch.inference_mode():
        exact = torch.nn.functional.rms_norm(x.double(), (24,), norm.weight.double(), 1e-5)
        assert (FrozenNorm(norm)(x) - exact).abs().max() < TOLERANCE[dtype]
        assert (norm(x) - exact).abs().max() < TOLERANCE[dtype]


def test_a_packed_model_equals_its_float64_self(tmp_path: Path) -> None:
    path = write_target(
        tmp_path,
        "qwen2",
        hidden_size=256,
        num_attention_heads=8,
        intermediate_size=768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    ids = torch.randint(0, VOCAB, (20,), generator=torch.Generator().manual_seed(0))
    results = []
    for dtype in (torch.float64, torch.float32):
        model = load_target(path, dtype=dtype)
        with torch.inference_mode():
            results.append(model(ids, [(model.new_cache(), 20)])[0])
    assert (results[0] - results[1]).abs().max() < 1e-5 * results[0].abs().max()
