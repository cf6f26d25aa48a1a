"""The cache of a Gemma 4 target: chunks, batches and rollbacks, also where sliding layers forget rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dspark.attention.cache import FIRST_CAPACITY
from dspark.errors import CapacityError, ConfigError
from dspark.target import load_target
from dspark.target.gemma4.cache import Gemma4Cache, SlidingStore
from dspark.target.gemma4.model import Gemma4TargetModel
from gemma4_zoo import FULL, SLIDING, VOCAB, WINDOW, write_target

EXACT = 1e-10
LONG = 300
"""More than twice what a store holds at first: sliding layers forget several times."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Gemma4TargetModel:
    return load_target(write_target(tmp_path_factory.mktemp("gemma4"), max_position_embeddings=512))


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def run(
    target: Gemma4TargetModel, cache: Gemma4Cache, ids: Tensor, keep: int | None = None
) -> tuple[Tensor, Tensor]:
    logits, taps = target(ids, [(cache, len(ids))], (-1, 0, 2))
    assert taps is not None
    cache.advance(len(ids) if keep is None else keep)
    return logits, taps


def committed(cache: Gemma4Cache) -> dict[str, Tensor]:
    """What later rows can still see."""
    full, sliding = cache.stores[FULL], cache.stores[SLIDING]
    seen = min(cache.length, WINDOW - 1)
    return {
        FULL: full.data[:, :, : full.length],
        SLIDING: sliding.data[:, :, sliding.length - seen : sliding.length],
    }


def assert_same(one: Gemma4Cache, other: Gemma4Cache) -> None:
    assert one.length == other.length
    for kind, data in committed(one).items():
        assert (data - committed(other)[kind]).abs().max() < EXACT, kind


@pytest.mark.parametrize(("count", "chunk"), [(50, 1), (50, 3), (LONG, 1), (LONG, 3), (LONG, 64)])
def test_chunks_equal_the_whole(target: Gemma4TargetModel, count: int, chunk: int) -> None:
    ids = tokens(count)
    whole_cache, cache = target.new_cache(), target.new_cache()
    logits, taps = run(target, whole_cache, ids)
    pieces = [run(target, cache, piece) for piece in ids.split(chunk)]
    assert (torch.cat([piece[0] for piece in pieces]) - logits).abs().max() < EXACT
    assert (torch.cat([piece[1] for piece in pieces]) - taps).abs().max() < EXACT
    assert_same(cache, whole_cache)


def test_sliding_layers_forget_and_full_layers_do_not(target: Gemma4TargetModel) -> None:
    cache = target.new_cache()
    for piece in tokens(LONG).split(8):
        run(target, cache, piece)
    assert cache.length == cache.stores[FULL].length == LONG
    sliding = cache.stores[SLIDING]
    assert sliding.capacity == FIRST_CAPACITY < LONG
    assert WINDOW - 1 <= sliding.length <= FIRST_CAPACITY
    assert sliding.forgotten + sliding.length == LONG


def test_a_window_longer_than_the_store_makes_it_grow_once(target: Gemma4TargetModel) -> None:
    store = SlidingStore(1, 1, 2, torch.float64, torch.device("cpu"), window=200)
    for position in range(1000):
        store.make_room(1)
        store.require(store.length + 1)
        store.data[:, :, store.length] = position
        store.advance(1)
        seen = min(position + 1, 200)
        held = store.data[0, 0, store.length - seen : store.length, 0]
        assert torch.equal(held, torch.arange(position + 1 - seen, position + 1, dtype=torch.float64))
    assert store.capacity == 512


def test_a_ragged_batch_equals_each_request_alone(target: Gemma4TargetModel) -> None:
    prompts = [tokens(n, seed=n) for n in (1, 7, 40, 126)]
    batch = [target.new_cache() for _ in prompts]
    segments = [(cache, len(ids)) for cache, ids in zip(batch, prompts, strict=True)]
    with torch.inference_mode():
        last, _ = target(torch.cat(prompts), segments, logits="last")
        for cache, ids in zip(batch, prompts, strict=True):
            cache.advance(len(ids))
        widths = [8, 1, 3, 6]
        steps = [tokens(n, seed=100 + n) for n in widths]
        logits, taps = target(torch.cat(steps), list(zip(batch, widths, strict=True)), (0, 2))
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


@pytest.mark.parametrize("prompt", [11, 122, 125, 128])
@pytest.mark.parametrize("kept", range(9))
def test_every_accepted_length_rolls_back_to_a_run_of_the_kept_tokens(
    target: Gemma4TargetModel, prompt: int, kept: int
) -> None:
    """Also where the pass is the one before which the sliding layers forget, or the one after it is."""
    before, block, after = tokens(prompt), tokens(8, seed=1), tokens(4, seed=2)
    cache, clean = target.new_cache(), target.new_cache()
    run(target, cache, before)
    run(target, cache, block, keep=kept)
    run(target, clean, torch.cat((before, block[:kept])))
    assert_same(cache, clean)
    assert (run(target, cache, after)[0] - run(target, clean, after)[0]).abs().max() < EXACT


def test_a_pass_that_is_not_committed_leaves_no_trace(target: Gemma4TargetModel) -> None:
    cache, clean = target.new_cache(), target.new_cache()
    for one in (cache, clean):
        run(target, one, tokens(125))
    with torch.inference_mode():
        target(tokens(8, seed=3), [(cache, 8)])
        for store in cache.stores.values():
            store.data[:, :, store.length :] = float("nan")
    after = tokens(8, seed=4)
    assert (run(target, cache, after)[0] - run(target, clean, after)[0]).abs().max() < EXACT


def test_misuse_is_refused(target: Gemma4TargetModel) -> None:
    cache = target.new_cache()
    with pytest.raises(ConfigError, match=r"segments of \[2\] rows"):
        target(tokens(3), [(cache, 2)])
    with pytest.raises(ConfigError, match="'all', 'last' or 'hidden'"):
        target(tokens(3), [(cache, 3)], logits="first")
    with pytest.raises(ConfigError, match="layer 5 cannot be tapped"), torch.inference_mode():
        target(tokens(3), [(cache, 3)], (5,))
    with pytest.raises(CapacityError, match="cannot commit"):
        cache.advance(1000)
    assert cache.length == 0
