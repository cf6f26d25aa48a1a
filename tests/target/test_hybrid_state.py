"""The hybrid cache: chunks, batches and rollbacks leave exactly what a run of the kept tokens leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from dspark.errors import CapacityError, ConfigError
from dspark.target import Target, load_target
from dspark.target.hybrid import delta
from dspark.target.hybrid.cache import HybridCache, Waiting
from hybrid_zoo import VOCAB, write_hybrid
from places import DATA

EXACT = 1e-10
BLOCK = 8
CASES = {
    "two-and-six-heads": {},
    "equal-heads-no-memory": {
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 3,
        "linear_conv_kernel_dim": 1,
    },
    "attention-first": {
        "layer_types": ["full_attention", "linear_attention", "full_attention", "linear_attention"]
    },
}


@pytest.fixture(scope="module", params=CASES)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(write_hybrid(tmp_path_factory.mktemp(request.param), **CASES[request.param]))


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def run(target: Target, cache: HybridCache, ids: Tensor, keep: int | None = None) -> tuple[Tensor, Tensor]:
    logits, taps = target(ids, [(cache, len(ids))], (-1, 0, 2))
    assert taps is not None
    cache.advance(len(ids) if keep is None else keep)
    return logits, taps


def difference(a: HybridCache, b: HybridCache) -> float:
    """The largest over keys, values, convolution inputs and recurrent states."""
    assert a.length == b.length
    kv = a.kv.data[:, :, : a.length] - b.kv.data[:, :, : b.length]
    parts = [part.abs().max() for part in (kv, a.conv - b.conv, a.state - b.state) if part.numel()]
    return float(torch.stack(parts).max())


def scale(cache: HybridCache) -> float:
    return float(cache.state.abs().max())


@pytest.mark.parametrize("kept", range(BLOCK + 1))
def test_every_kept_length_equals_a_run_of_the_kept_tokens(target: Target, kept: int) -> None:
    prompt, block, after = tokens(11), tokens(BLOCK, seed=1), tokens(4, seed=2)
    cache, clean = target.new_cache(), target.new_cache()
    run(target, cache, prompt)
    run(target, cache, block, keep=kept)
    for token in torch.cat((prompt, block[:kept])).split(1):
        run(target, clean, token)
    assert scale(clean) > 0.1
    assert difference(cache, clean) < EXACT
    next_logits, _ = run(target, cache, after)
    assert (next_logits - run(target, clean, after)[0]).abs().max() < EXACT
    assert difference(cache, clean) < EXACT


@pytest.mark.parametrize("kept", range(BLOCK + 1))
def test_the_text_after_every_kept_length_is_that_of_a_run_of_the_kept_tokens(kept: int) -> None:
    target = load_target(DATA / "hybrid" / "target", dtype=torch.float64)
    prompt, block = torch.arange(40, 60), torch.arange(300, 300 + BLOCK)
    cache, clean = target.new_cache(), target.new_cache()
    run(target, cache, prompt)
    run(target, cache, block, keep=kept)
    run(target, clean, torch.cat((prompt, block[:kept])))
    assert greedy(target, cache, 7) == greedy(target, clean, 7)


def greedy(target: Target, cache: HybridCache, first: int, count: int = 24) -> list[int]:
    text, token = [], first
    for _ in range(count):
        logits, _ = run(target, cache, torch.tensor([token]))
        token = int(logits[-1].argmax())
        text.append(token)
    assert len(set(text)) > 4
    return text


def test_many_rounds_of_rollback_drift_nowhere(target: Target) -> None:
    cache, clean = target.new_cache(), target.new_cache()
    for number in range(60):
        block = tokens(BLOCK, seed=number)
        kept = number % (BLOCK + 1)
        run(target, cache, block, keep=kept)
        if kept:
            run(target, clean, block[:kept])
    assert cache.length > 200
    assert difference(cache, clean) < EXACT


@pytest.mark.parametrize("kept", [0, 1, 63, 64, 65, 149, 150])
def test_a_long_pass_may_be_kept_in_part_too(target: Target, kept: int) -> None:
    prompt, ids = tokens(5), tokens(150, seed=1)
    cache, clean = target.new_cache(), target.new_cache()
    run(target, cache, prompt)
    run(target, cache, ids, keep=kept)
    run(target, clean, torch.cat((prompt, ids[:kept])))
    assert difference(cache, clean) < EXACT


@torch.inference_mode()
def test_a_long_pass_beside_others_may_be_kept_in_part_too(target: Target) -> None:
    widths, kept = (5, 70, 150), (2, 30, 66)
    parts = [tokens(n, seed=n) for n in widths]
    batch = [target.new_cache() for _ in parts]
    for number, cache in enumerate(batch):
        run(target, cache, tokens(7, seed=number))
    target(torch.cat(parts), list(zip(batch, widths, strict=True)))
    for cache, count in zip(batch, kept, strict=True):
        cache.advance(count)
    for number, (cache, part, count) in enumerate(zip(batch, parts, kept, strict=True)):
        clean = target.new_cache()
        run(target, clean, tokens(7, seed=number))
        run(target, clean, part[:count])
        assert difference(cache, clean) < EXACT


@torch.inference_mode()
def test_a_long_pass_keeps_states_and_no_rows(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """And computes them once: a commit of all rows puts them in their place."""
    held = []
    for rows in (delta.AT_ONCE + 1, 5 * delta.AT_ONCE):
        cache, clean = target.new_cache(), target.new_cache()
        run(target, clean, tokens(rows))
        target(tokens(rows), [(cache, rows)])
        assert cache._pending is not None and not cache.state.any()
        held.append(waiting_bytes(cache._pending.waiting))
        with monkeypatch.context() as patch:
            patch.delattr(delta, "carry")
            cache.advance(rows)
        assert difference(cache, clean) < EXACT and scale(cache) > 0.1
    assert held == [cache.state_bytes] * 2


def waiting_bytes(waiting: Waiting) -> int:
    names = {name for part in type(waiting).__mro__ for name in getattr(part, "__slots__", ())}
    parts = [getattr(waiting, name, None) for name in names]
    return sum(part.nbytes for part in parts if isinstance(part, Tensor))


@pytest.mark.parametrize("chunk", [1, 3, 64, 100])
def test_chunks_equal_the_whole(target: Target, chunk: int) -> None:
    ids = tokens(2 * delta.AT_ONCE + 13)
    whole_cache, cache = target.new_cache(), target.new_cache()
    logits, taps = run(target, whole_cache, ids)
    pieces = [run(target, cache, piece) for piece in ids.split(chunk)]
    assert (torch.cat([piece[0] for piece in pieces]) - logits).abs().max() < EXACT
    assert (torch.cat([piece[1] for piece in pieces]) - taps).abs().max() < EXACT
    assert difference(cache, whole_cache) < EXACT


@pytest.mark.parametrize("lengths", [(1, 7, 40), (5, 5, 5), (1, 1), (3, 100, 64)], ids=str)
def test_a_ragged_batch_equals_each_request_alone(target: Target, lengths: tuple[int, ...]) -> None:
    prompts = [tokens(n, seed=n + i) for i, n in enumerate(lengths)]
    batch = [target.new_cache() for _ in prompts]
    widths = [(8, 1, 3)[i] for i in range(len(lengths))]
    kept = [(5, 1, 0)[i] for i in range(len(lengths))]
    steps = [tokens(n, seed=100 + n) for n in widths]
    with torch.inference_mode():
        last, _ = target(
            torch.cat(prompts),
            [(cache, len(ids)) for cache, ids in zip(batch, prompts, strict=True)],
            logits="last",
        )
        for cache, ids in zip(batch, prompts, strict=True):
            cache.advance(len(ids))
        logits, taps = target(torch.cat(steps), list(zip(batch, widths, strict=True)), (0, 2))
        for cache, count in zip(batch, kept, strict=True):
            cache.advance(count)
    assert taps is not None
    start = 0
    for index, (prompt, step) in enumerate(zip(prompts, steps, strict=True)):
        cache = target.new_cache()
        alone, _ = run(target, cache, prompt)
        assert (alone[-1] - last[index]).abs().max() < EXACT
        with torch.inference_mode():
            expected, expected_taps = target(step, [(cache, len(step))], (0, 2))
        cache.advance(kept[index])
        rows = slice(start, start + len(step))
        assert (expected - logits[rows]).abs().max() < EXACT
        assert (expected_taps - taps[rows]).abs().max() < EXACT
        assert difference(cache, batch[index]) < EXACT
        start += len(step)


def test_a_pass_that_is_never_committed_leaves_no_trace(target: Target) -> None:
    cache, clean = target.new_cache(), target.new_cache()
    for each in (cache, clean):
        run(target, each, tokens(9))
    with torch.inference_mode():
        target(tokens(5, seed=3), [(cache, 5)])
    run(target, cache, tokens(4, seed=4), keep=2)
    run(target, clean, tokens(4, seed=4)[:2])
    assert difference(cache, clean) < EXACT


@pytest.mark.parametrize("rows", [2, 4])
def test_a_neighbours_nan_stays_with_it(target: Target, rows: int) -> None:
    """Whichever of the two is padded."""
    good, bad, clean = (target.new_cache() for _ in range(3))
    with torch.inference_mode():
        bad.state.fill_(float("nan"))
        logits, _ = target(tokens(6), [(good, rows), (bad, 6 - rows)])
        expected, _ = target(tokens(6)[:rows], [(clean, rows)])
    assert logits[rows:].isnan().any()
    assert (logits[:rows] - expected).abs().max() < EXACT
    good.advance(2)
    clean.advance(2)
    assert difference(good, clean) < EXACT


def test_what_waits_is_small_and_no_state_is_copied(target: Target) -> None:
    """A pass reads the states in place; keeping everything costs what keeping a part does: one update."""
    cache = target.new_cache()
    run(target, cache, tokens(10))
    before, place = cache.state.clone(), cache.state.data_ptr()
    with torch.inference_mode():
        target(tokens(BLOCK, seed=1), [(cache, BLOCK)])
    assert torch.equal(cache.state, before)
    cache.advance(BLOCK)
    assert cache.state.data_ptr() == place and not torch.equal(cache.state, before)


def test_large_states_are_carried_layer_by_layer_alike(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, other = target.new_cache(), target.new_cache()
    run(target, cache, tokens(9), keep=7)
    monkeypatch.setattr(delta, "CACHED_BYTES", 0)
    run(target, other, tokens(9), keep=7)
    assert difference(cache, other) < EXACT


def test_misuse_is_refused(target: Target) -> None:
    cache = target.new_cache()
    cache.advance(0)
    with pytest.raises(CapacityError, match="cannot commit 1 rows at length 0: 0 wait"):
        cache.advance(1)
    with torch.inference_mode():
        target(tokens(3), [(cache, 3)])
    for count in (-1, 4):
        with pytest.raises(CapacityError, match=f"cannot commit {count} rows at length 0: 3 wait"):
            cache.advance(count)
    cache.advance(2)
    with pytest.raises(CapacityError, match="cannot commit 1 rows at length 2: 0 wait"):
        cache.advance(1)
    with pytest.raises(ConfigError, match=r"segments of \[2\] rows"):
        target(tokens(3), [(cache, 2)])
    with pytest.raises(ConfigError, match="layer 4 cannot be tapped"), torch.inference_mode():
        target(tokens(3), [(cache, 3)], (4,))


def test_the_closed_form_is_the_rule(tmp_path: Path) -> None:
    """`rows` and `carry` against the recurrence written down row by row."""
    generator = torch.Generator().manual_seed(5)
    heads, groups, count, key_dim, value_dim = 2, 3, 9, 5, 7

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    state = draw(1, heads, key_dim, groups, value_dim)
    keys = torch.nn.functional.normalize(draw(heads, count, key_dim), dim=-1)
    queries = draw(heads, count, key_dim)
    values = draw(1, heads, groups, count, value_dim)
    log_decay, beta = -draw(1, heads, groups, count).abs(), draw(1, heads, groups, count).sigmoid()
    both = torch.stack((queries, keys), dim=1)
    read = delta.read_state(both, state[0])[None]
    out, updates = delta.rows(both[None], values, log_decay, beta, read)
    for head in range(heads):
        for group in range(groups):
            s = state[0, head, :, group].clone()
            for t in range(count):
                s *= log_decay[0, head, group, t].exp()
                u = beta[0, head, group, t] * (values[0, head, group, t] - s.T @ keys[head, t])
                s += torch.outer(keys[head, t], u)
                assert (u - updates[0, head, group, t]).abs().max() < 1e-12
                assert (s.T @ queries[head, t] - out[0, head, group, t]).abs().max() < 1e-12
                if t in (0, 4, count - 1):
                    carried, rows = state.clone(), slice(t + 1)
                    delta.carry(carried, keys[None, :, rows], log_decay[..., rows], updates[..., rows, :])
                    assert (carried[0, head, :, group] - s).abs().max() < 1e-12
