"""The target's cache: chunks, batches and rollbacks leave exactly what a run of the kept tokens leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from dspark.attention.cache import FIRST_CAPACITY
from dspark.attention.functional import ROWS_AT_ONCE
from dspark.errors import CapacityError, ConfigError
from dspark.target import KVCache, TargetConfig, TargetModel, load_target
from dspark.target.parameters import target_shapes
from model_zoo import VOCAB, write_target

EXACT = 1e-10
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 5}


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3", "windows"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    path = tmp_path_factory.mktemp(request.param)
    if request.param == "windows":
        return load_target(write_target(path, "qwen3", **WINDOWS))
    return load_target(write_target(path, request.param))


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def run(target: TargetModel, cache: KVCache, ids: Tensor, keep: int | None = None) -> tuple[Tensor, Tensor]:
    logits, taps = target(ids, [(cache, len(ids))], (-1, 0, 2))
    assert taps is not None
    cache.advance(len(ids) if keep is None else keep)
    return logits, taps


def committed(cache: KVCache) -> Tensor:
    return cache.data[:, :, : cache.length]


def test_taps_come_in_the_order_that_is_asked_for(target: TargetModel) -> None:
    """Which is that of the projection's columns, and need not ascend."""
    ids = tokens(9)
    with torch.inference_mode():
        ordered, asked = (
            target(ids, [(target.new_cache(), 9)], taps)[1] for taps in ((-1, 0, 2), (2, -1, 0))
        )
    assert ordered is not None and asked is not None
    before, first, third = ordered.chunk(3, -1)
    assert not torch.equal(first, third)
    assert torch.equal(asked, torch.cat((third, before, first), -1))


@pytest.mark.parametrize("chunk", [1, 3, 50])
def test_chunks_equal_the_whole(target: TargetModel, chunk: int) -> None:
    ids = tokens(50)
    whole_cache, cache = target.new_cache(), target.new_cache()
    logits, taps = run(target, whole_cache, ids)
    pieces = [run(target, cache, piece) for piece in ids.split(chunk)]
    assert (torch.cat([piece[0] for piece in pieces]) - logits).abs().max() < EXACT
    assert (torch.cat([piece[1] for piece in pieces]) - taps).abs().max() < EXACT
    assert (committed(cache) - committed(whole_cache)).abs().max() < EXACT


def test_a_prompt_longer_than_one_piece_of_attention_equals_single_calls(target: TargetModel) -> None:
    ids = tokens(2 * ROWS_AT_ONCE + 7)
    whole, _ = run(target, target.new_cache(), ids)
    cache = target.new_cache()
    for piece in ids[:-9].split(64):
        run(target, cache, piece)
    tail = torch.cat([run(target, cache, one)[0] for one in ids[-9:].split(1)])
    assert (tail - whole[-9:]).abs().max() < EXACT


def test_a_ragged_batch_equals_each_request_alone(target: TargetModel) -> None:
    prompts = [tokens(n, seed=n) for n in (1, 7, 40)]
    batch = [target.new_cache() for _ in prompts]
    segments = [(cache, len(ids)) for cache, ids in zip(batch, prompts, strict=True)]
    with torch.inference_mode():
        last, _ = target(torch.cat(prompts), segments, logits="last")
        for cache, ids in zip(batch, prompts, strict=True):
            cache.advance(len(ids))
        widths = [8, 1, 3]
        steps = [tokens(n, seed=100 + n) for n in widths]
        logits, taps = target(torch.cat(steps), list(zip(batch, widths, strict=True)), (0, 2))
    assert taps is not None
    start = 0
    for index, (prompt, step) in enumerate(zip(prompts, steps, strict=True)):
        cache = target.new_cache()
        alone, _ = run(target, cache, prompt)
        assert (alone[-1] - last[index]).abs().max() < EXACT
        with torch.inference_mode():
            expected, expected_taps = target(step, [(cache, len(step))], (0, 2))
        rows = slice(start, start + len(step))
        assert (expected - logits[rows]).abs().max() < EXACT
        assert (expected_taps - taps[rows]).abs().max() < EXACT
        start += len(step)


@pytest.mark.parametrize("kept", range(9))
def test_every_accepted_length_rolls_back_to_a_run_of_the_kept_tokens(target: TargetModel, kept: int) -> None:
    prompt, block, after = tokens(11), tokens(8, seed=1), tokens(4, seed=2)
    cache, clean = target.new_cache(), target.new_cache()
    run(target, cache, prompt)
    run(target, cache, block, keep=kept)
    run(target, clean, torch.cat((prompt, block[:kept])))
    assert (committed(cache) - committed(clean)).abs().max() < EXACT
    assert (run(target, cache, after)[0] - run(target, clean, after)[0]).abs().max() < EXACT


def test_growing_keeps_what_was_committed(target: TargetModel) -> None:
    cache, first = target.new_cache(), FIRST_CAPACITY
    run(target, cache, tokens(first - 2))
    assert cache.capacity == first
    before = committed(cache).clone()
    run(target, cache, tokens(8, seed=3), keep=0)
    assert cache.capacity > first
    assert torch.equal(committed(cache), before)


def test_rejected_rows_leave_no_trace_even_if_they_are_nan(target: TargetModel) -> None:
    cache = target.new_cache()
    run(target, cache, tokens(6))
    with torch.inference_mode():
        cache.data[:, :, cache.length :] = float("nan")
    assert run(target, cache, tokens(3, seed=4))[0].isfinite().all()


def test_the_frozen_and_the_differentiable_model_agree(target: TargetModel, tmp_path: Path) -> None:
    """`freeze` fuses, folds and prepares; without it the modules compute as written."""
    family = "qwen3" if any(target.config.windows) else target.config.architecture[:5].lower()
    changes = WINDOWS if any(target.config.windows) else {}
    path = write_target(tmp_path, family, **changes)
    from safetensors.torch import load_file

    plain = TargetModel(TargetConfig.from_directory(path)).to(torch.float64)
    plain.load_state_dict(load_file(path / "model.safetensors"))
    ids = tokens(30, seed=5)
    expected, expected_taps = run(target, target.new_cache(), ids)
    with torch.no_grad():
        logits, taps = plain(ids, [(plain.new_cache(), 30)], (-1, 0, 2))
    assert (logits - expected).abs().max() < EXACT
    assert (taps - expected_taps).abs().max() < EXACT


def test_the_table_of_tensors_is_that_of_the_modules(target: TargetModel, tmp_path: Path) -> None:
    from dspark.checkpoint.weights import WeightFiles

    path = write_target(tmp_path, "llama", mlp_bias=True, attention_bias=True)
    config = TargetConfig.from_directory(path)
    shapes = {name: tuple(p.shape) for name, p in TargetModel(config).named_parameters()}
    assert target_shapes(config, WeightFiles.open(path)) == shapes


def test_misuse_is_refused(target: TargetModel) -> None:
    cache = target.new_cache()
    with pytest.raises(ConfigError, match=r"segments of \[2\] rows"):
        target(tokens(3), [(cache, 2)])
    with pytest.raises(ConfigError, match="'all', 'last' or 'hidden'"):
        target(tokens(3), [(cache, 3)], logits="first")
    with pytest.raises(ConfigError, match="layer 4 cannot be tapped"), torch.inference_mode():
        target(tokens(3), [(cache, 3)], (4,))
    with pytest.raises(CapacityError, match="cannot commit"):
        cache.advance(cache.capacity + 1)
