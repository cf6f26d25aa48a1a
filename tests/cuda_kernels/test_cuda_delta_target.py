"""Hybrid targets whose linear layers run by kernel, through the launcher and the stand-in for the driver."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from cuda_host import Library, compiled_kernels, stand_in
from dspark import DSparkDecoder, SamplingParams
from dspark.errors import CapacityError, KernelError
from dspark.kernels import choose
from dspark.target import Target, load_target
from dspark.target.hybrid.cache import HybridCache
from hybrid_zoo import VOCAB, write_hybrid
from places import DATA

TARGET, DRAFT = DATA / "hybrid" / "target", DATA / "hybrid" / "draft-nested"
TRACE: list[dict[str, Any]] = json.loads((DRAFT / "golden" / "trace.json").read_text())
GOLDEN, SAME = 1e-4, 2e-5
TOKENS = 32
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def driver() -> Iterator[Library]:
    with stand_in(compiled_kernels()) as made:
        yield made


@pytest.fixture(scope="module")
def pair(driver: Library, tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Target]:
    """The same random float32 target by kernel and by torch."""
    path = write_hybrid(tmp_path_factory.mktemp("hybrid"))
    ours, torchs = (load_target(path, dtype=torch.float32) for _ in range(2))
    assert ours.use_kernels(choose(CPU))["recurrence"] == "kernel: heads of 8 and 12"
    return ours, torchs


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def batch(target: Target, caches: list[HybridCache], counts: list[int], kept: list[int], seed: int) -> Tensor:
    logits, _ = target(tokens(sum(counts), seed), list(zip(caches, counts, strict=True)))
    for cache, count in zip(caches, kept, strict=True):
        cache.advance(count)
    return logits


def difference(a: HybridCache, b: HybridCache) -> float:
    assert a.length == b.length
    return float(torch.stack([(a.conv - b.conv).abs().max(), (a.state - b.state).abs().max()]).max())


def test_many_ragged_rounds_are_those_of_torch(driver: Library, pair: tuple[Target, Target]) -> None:
    """Prompts by torch, then passes of up to 16 rows by kernel, kept in part, now and then not at all."""
    sides = [(target, [target.new_cache() for _ in range(3)]) for target in pair]
    counts, kept = [40, 3, 17], [40, 3, 17]
    rows, carries = driver.launches("delta_rows_f32_r16"), driver.launches("delta_carry_f32")
    for number in range(12):
        ours, torchs = (batch(target, caches, counts, kept, number) for target, caches in sides)
        assert (ours - torchs).abs().max() < SAME * torchs.abs().max(), number
        for a, b in zip(sides[0][1], sides[1][1], strict=True):
            assert difference(a, b) < SAME * float(b.state.abs().max()), number
        counts = [1 + (5 * number + 7 * request) % 16 for request in range(3)]
        kept = [(number + request) % (count + 1) for request, count in enumerate(counts)]
    assert driver.launches("delta_rows_f32_r16") > rows and driver.launches("delta_carry_f32") > carries


def test_a_pass_leaves_the_states_and_a_commit_stays_in_place(pair: tuple[Target, Target]) -> None:
    target = pair[0]
    cache = target.new_cache()
    batch(target, [cache], [11], [11], 0)
    state, conv, place = cache.state.clone(), cache.conv.clone(), cache.state.data_ptr()
    batch(target, [cache], [8], [0], 1)
    assert torch.equal(cache.state, state) and torch.equal(cache.conv, conv)
    batch(target, [cache], [8], [8], 2)
    assert cache.state.data_ptr() == place and not torch.equal(cache.state, state)
    with pytest.raises(CapacityError):
        cache.advance(1)


def test_a_fork_goes_on_alone(pair: tuple[Target, Target]) -> None:
    target = pair[0]
    cache = target.new_cache()
    batch(target, [cache], [9], [9], 0)
    forked = cache.fork(9)
    assert forked is not None
    ours = batch(target, [forked], [4], [2], 3)
    assert torch.equal(ours, batch(target, [cache], [4], [2], 3)) and difference(cache, forked) == 0.0


@torch.inference_mode()
def test_two_rounds_of_golden_numbers(driver: Library) -> None:
    golden, target = load_file(DRAFT / "golden" / "golden.safetensors"), load_target(TARGET)
    assert target.use_kernels(choose(CPU))["recurrence"].startswith("kernel")
    cache = target.new_cache()
    ids = golden["prompt_ids"].long()
    logits, _ = target(ids, [(cache, len(ids))])
    assert (logits - golden["target_logits"]).abs().max() < GOLDEN
    cache.advance(len(ids))
    block = torch.cat((golden["anchor_id"], golden["draft_tokens"])).long()
    verified, _ = target(block, [(cache, len(block))])
    assert (verified - golden["verify_logits"]).abs().max() < GOLDEN


def test_the_golden_text(driver: Library) -> None:
    rows, params = TRACE[:2], SamplingParams(max_tokens=TOKENS, temperature=0.0)
    before = driver.launches("delta_carry_f32")
    with DSparkDecoder.from_pretrained(TARGET, DRAFT, device="cpu", policy="fixed") as decoder:
        assert decoder.info()["kernels"]["recurrence"] == "kernel: heads of 16 and 16"
        results = decoder.generate([row["prompt_ids"] for row in rows], params)
    assert [list(result.token_ids) for result in results] == [row["ar_output_ids"][:TOKENS] for row in rows]
    assert any(0 < r.accepted < r.verified for result in results for r in result.rounds)
    assert driver.launches("delta_carry_f32") > before


@pytest.mark.parametrize(
    ("changes", "dtype", "reason"),
    [
        ({}, torch.float64, "torch: float64 activations"),
        ({"linear_value_head_dim": 130}, torch.float32, "torch: 130 numbers in a value"),
        ({"linear_conv_kernel_dim": 5}, torch.float32, "torch: 5 taps of the convolution"),
    ],
)
def test_what_the_kernels_do_not_serve_stays_with_torch(
    driver: Library, tmp_path: Path, changes: dict[str, Any], dtype: torch.dtype, reason: str
) -> None:
    path = write_hybrid(tmp_path, **changes)
    ours, torchs = (load_target(path, dtype=dtype) for _ in range(2))
    assert ours.use_kernels(choose(CPU))["recurrence"].startswith(reason)
    first, second = (batch(target, [target.new_cache()], [6], [6], 0) for target in (ours, torchs))
    assert (first - second).abs().max() < SAME * second.abs().max()


def test_a_launch_that_fails_is_an_error_that_says_so(driver: Library, pair: tuple[Target, Target]) -> None:
    cache = pair[0].new_cache()
    says = pytest.raises(KernelError, match=r"delta_rows_f32_r4.*ILLEGAL_ADDRESS")
    with stand_in(compiled_kernels(), DSPARK_STANDIN_FAIL="cuLaunchKernel:1:700"), says:
        batch(pair[0], [cache], [3], [0], 0)
