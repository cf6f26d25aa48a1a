"""Attention by kernel through the launcher: a pass equals torch's, and what is not the kernel's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from cuda_host import Library, compiled_kernels, stand_in
from dspark import _core
from dspark.attention import AttentionKernel, CachedAttention, KVStore, attention_kernel, cached
from dspark.attention.kernel import MOST_ROWS
from dspark.errors import KernelError
from dspark.kernels import Choice, choose

CPU = torch.device("cpu")
LAYERS, KEY_HEADS, QUERY_HEADS = 2, 2, 6
TOLERANCE = {torch.float32: 1e-5, torch.float16: 8e-3, torch.bfloat16: 6e-2}


@pytest.fixture
def driver() -> Iterator[Library]:
    with stand_in(compiled_kernels()) as made:
        yield made


def stores(lengths: Sequence[int], dtype: torch.dtype, size: int) -> list[KVStore]:
    torch.manual_seed(5)
    made = []
    for length in lengths:
        store = KVStore(LAYERS, KEY_HEADS, size, dtype, CPU)
        store.require(length + 1)
        store.data.normal_()
        store.length = length
        made.append(store)
    return made


def attended(
    kernel: AttentionKernel | None, requests: Sequence[tuple[int, int]], heads: Tensor, how: Sequence[Any]
) -> tuple[list[Tensor], list[Tensor]]:
    """Each layer's output, and the caches afterwards."""
    caches = stores([length for length, _ in requests], heads.dtype, heads.shape[-1])
    segments = [(store, rows) for store, (_, rows) in zip(caches, requests, strict=True)]
    attention = CachedAttention(segments, QUERY_HEADS, *how, kernel=kernel)
    outputs = [attention.layer(layer, heads) for layer in range(LAYERS)]
    return outputs, [store.data[:, :, : store.length + rows] for store, rows in segments]


@pytest.mark.parametrize("size", [16, 64, 128, 256])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize(
    "how",
    [
        ([None, 40], True, "sliding"),
        ([None, 9], False, "anchored, bidirectional"),
        ([30, None], False, "anchored"),
    ],
    ids=["sliding", "bidirectional", "anchored"],
)
@torch.inference_mode()
def test_a_pass_equals_torchs(driver: Library, dtype: torch.dtype, size: int, how: tuple[Any, ...]) -> None:
    requests = [(0, 3), (5, 1), (330, 7), (64, 17)]  # the third is split where its keys are not bounded
    kernel = attention_kernel(choose(CPU), dtype, [size])
    assert kernel.kernels is not None and kernel.how.startswith("kernel: ")
    torch.manual_seed(1)
    wide = (0.4 * torch.randn(28, QUERY_HEADS + 2 * KEY_HEADS + 3, size)).to(dtype)
    wide[:, :QUERY_HEADS] *= 6 * size**-0.5
    heads = wide[:, : QUERY_HEADS + 2 * KEY_HEADS]
    name = kernel_name(dtype, size)
    before = driver.launches(f"attend_{name}"), driver.launches(f"merge_{name}")
    found, caches = attended(kernel, requests, heads, how)
    assert driver.launches(f"attend_{name}") == before[0] + LAYERS
    assert driver.launches(f"merge_{name}") == before[1] + 1
    with mock.patch.object(cached, "_suits_core", return_value=False):
        expected, others = attended(None, requests, heads, how)
    for one, other in zip(found, expected, strict=True):
        assert (one.float() - other.float()).abs().max() < TOLERANCE[dtype]
    for cache, other in zip(caches, others, strict=True):
        assert torch.equal(cache, other)


def kernel_name(dtype: torch.dtype, size: int) -> str:
    return f"{ {torch.float32: 'f32', torch.float16: 'f16', torch.bfloat16: 'bf16'}[dtype] }_d{size}"


@torch.inference_mode()
def test_more_shared_memory_is_asked_for_once(
    driver: Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A block gets 48 KiB by itself; the stand-in refuses a request for all that a block can have."""
    (tmp_path / "kernels").symlink_to(compiled_kernels())  # a choice of its own
    monkeypatch.setenv("DSPARK_KERNEL_CACHE", str(tmp_path / "kernels"))
    wide, narrow = (torch.randn(10, QUERY_HEADS + 2 * KEY_HEADS, size) for size in (256, 16))
    kernel = attention_kernel(choose(CPU), torch.float32, [16, 256])
    how = ([None, None], True)
    for heads, asked in ((narrow, 0), (wide, 1), (wide, 1), (narrow, 1)):
        attended(kernel, [(5, 7), (3, 3)], heads, how)
        assert driver.calls("cuFuncSetAttribute") == asked
    monkeypatch.setenv("DSPARK_STANDIN_FAIL", "cuFuncSetAttribute:1:1")
    (tmp_path / "again").symlink_to(compiled_kernels())
    monkeypatch.setenv("DSPARK_KERNEL_CACHE", str(tmp_path / "again"))
    kernel = attention_kernel(choose(CPU), torch.float32, [256])
    with pytest.raises(KernelError, match="attend_f32_d256 shared memory: cuFuncSetAttribute returned"):
        attended(kernel, [(5, 7), (3, 3)], wide, how)


@torch.inference_mode()
def test_what_the_kernel_does_not_do_is_torchs(driver: Library) -> None:
    kernel = attention_kernel(choose(CPU), torch.float32, [64])
    many = torch.randn(MOST_ROWS + 4, QUERY_HEADS + 2 * KEY_HEADS, 64)
    heads = many[:20].contiguous()
    how = ([None, None], True)
    before = driver.launches("attend_f32_d64")
    attended(kernel, [(5, MOST_ROWS + 1), (3, 3)], many, how)
    attended(kernel, [(5, 7), (3, 13)], heads[..., :48].contiguous(), how)  # another head size
    attended(kernel, [(5, 7), (3, 13)], heads.double(), how)
    with torch.inference_mode(False), torch.enable_grad():
        attended(kernel, [(5, 7), (3, 13)], heads.clone(), how)
    assert driver.launches("attend_f32_d64") == before
    attended(kernel, [(5, 7), (3, 13)], heads, how)
    assert driver.launches("attend_f32_d64") == before + LAYERS


def test_why_there_is_none(driver: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    assert attention_kernel(Choice(None, "reasons"), torch.float32, [64]).how == "torch: reasons"
    how = attention_kernel(choose(CPU), torch.float64, [64]).how
    assert how == "torch: there is no kernel for float64 heads of 64"
    how = attention_kernel(choose(CPU), torch.float32, [512, 48]).how
    assert how == "torch: there is no kernel for float32 heads of 48 and 512"
    assert attention_kernel(choose(CPU), torch.bfloat16, [512, 256]).how == "kernel: bfloat16 heads of 256"


def test_what_a_pass_must_not_be(driver: Library) -> None:
    kernels = choose(CPU).kernels
    assert kernels is not None
    space = torch.zeros(4096)
    place = space.data_ptr()

    def made(
        dtype: str = "float32", heads: int = 6, rows: int = 1, cache: int = place
    ) -> _core.KernelAttention:
        segments = [(cache, 1024, 256, 1, rows)]
        return _core.KernelAttention(kernels, dtype, 2, heads, 64, segments, [(True, 0, False)])

    for options, sentence in [
        ({"dtype": "float64"}, "no attention kernel for float64"),
        ({"heads": 5}, "5 query heads for 2 key heads"),
        ({"rows": MOST_ROWS + 1}, "33 rows"),
        ({"cache": place + 4}, "multiples of 16 bytes"),
    ]:
        with pytest.raises(KernelError, match=sentence):
            made(**options)  # type: ignore[arg-type]
    with pytest.raises(KernelError, match="kind of visibility 1"):
        made().layer(0, 1, place, 640, place, place, place, 0)
    with pytest.raises(KernelError, match="multiples of 16 bytes"):
        made().layer(0, 0, place, 641, place, place, place, 0)
