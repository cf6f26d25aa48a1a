"""Caches hold what was reserved for them and not a row more; taps that wait are bounded and lose nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest
import torch
from torch import Tensor

from dspark.attention import KVStore
from dspark.attention.cache import FIRST_CAPACITY
from dspark.draft import DSparkDraftModel
from dspark.errors import CapacityError
from dspark.serve import feed
from dspark.serve.runner import Runner
from dspark.target.gemma4.cache import Gemma4Cache, SlidingStore
from dspark.target.hybrid.cache import HybridCache
from runner_zoo import EXACT, KINDS, Pair, assert_same, decode, plain, prefill, tokens

PROMPT = tokens(40)
NATIVE = [kind for kind in KINDS if kind != "adapter"]


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest, pairs: Callable[[str], Pair]) -> Pair:
    return pairs(request.param)


def allocated(runner: Runner, request: int) -> set[int]:
    """Positions in the memory of every store that keeps all of them, without the draft's own block."""
    cache, context = runner._caches[request], runner._feed.contexts[request]
    stores: list[KVStore] = [cache] if isinstance(cache, KVStore) else []
    if isinstance(cache, HybridCache):
        stores = [cache.kv]
    elif isinstance(cache, Gemma4Cache):
        stores = [store for store in cache.stores.values() if not isinstance(store, SlidingStore)]
    for store in (*stores, context):
        assert store.data.untyped_storage().nbytes() == store.data.numel() * store.data.element_size()
    block = context.block_size if context.reserved else 0
    return {*(store.capacity for store in stores), context.capacity - block}


def sliding(runner: Runner, request: int) -> SlidingStore:
    cache = runner._caches[request]
    return next(store for store in cache.stores.values() if isinstance(store, SlidingStore))


def reserve(runner: Runner, request: int, positions: int) -> None:
    with torch.inference_mode():
        runner.reserve([request], [positions])


def test_what_is_allocated_is_what_was_reserved(pair: Pair) -> None:
    runner = pair.runner()
    reserve(runner, 1, 48)
    prefill(runner, 1, PROMPT)
    assert allocated(runner, 1) == {48}
    decode(runner, 1, 7, 1)
    reserve(runner, 1, 64)
    decode(runner, 1, 7, 2)
    assert allocated(runner, 1) == {64}
    reserve(runner, 1, 16)
    assert allocated(runner, 1) == {64}, "never less than there was"


@pytest.mark.parametrize("first", [True, False], ids=["reserved first", "forked first"])
def test_a_fork_has_the_room_reserved_for_it(pair: Pair, first: bool) -> None:
    runner = pair.runner()
    reserve(runner, 1, 48)
    prefill(runner, 1, PROMPT, [32, 8])
    if first:
        reserve(runner, 2, 80)
    with torch.inference_mode():
        assert runner.fork(2, 1, 32, True) == 32
    if not first:
        reserve(runner, 2, 80)
    assert allocated(runner, 2) == {80}
    assert allocated(runner, 1) == {48}
    assert not runner._reserved


def test_a_fork_alone_takes_what_it_holds(pair: Pair) -> None:
    runner = pair.runner()
    prefill(runner, 1, PROMPT, [32, 8])
    with torch.inference_mode():
        runner.feed([1])
        assert runner.fork(2, 1, 32, True) == 32
    assert allocated(runner, 2) == {32}


@pytest.mark.parametrize("kind", NATIVE)
def test_nothing_grows_behind_the_cores_back(pairs: Callable[[str], Pair], kind: str) -> None:
    runner = pairs(kind).runner()
    reserve(runner, 1, 41)
    prefill(runner, 1, PROMPT)
    with torch.inference_mode():
        runner.verify([1], [3], [1])
        with pytest.raises(CapacityError, match=r"room for \d+ positions of a request, and 41 were reserved"):
            runner.verify([1], [3, 4], [2])
        runner.draft([1], [3])  # a block is no part of the text: its rows are beside what is reserved
    # A pass that could not be made leaves no trace.
    reserve(runner, 1, 64)
    clean = pairs(kind).runner()
    prefill(clean, 1, PROMPT)
    assert_same(decode(runner, 1, 7, 2)[0], decode(clean, 1, 7, 2)[0])


def test_without_a_reservation_caches_grow_by_doubling(pairs: Callable[[str], Pair]) -> None:
    runner = pairs("dense").runner()
    prefill(runner, 1, PROMPT)
    runner.feed([1])
    assert allocated(runner, 1) == {FIRST_CAPACITY}


@pytest.mark.parametrize("pages", [1, 3])
def test_pages_of_a_sliding_layer_are_a_windows_at_most(pairs: Callable[[str], Pair], pages: int) -> None:
    """Granted page by page with room for the next block, as the engine does; never refused, never wrong."""
    pair, width = pairs("gemma4"), 6
    runner, clean = pair.runner(), pair.runner()
    for one in (runner, clean):
        if one is runner:
            reserve(runner, 1, 16)
        prefill(one, 1, PROMPT[:9])
    text = tokens(100, seed=8)
    while runner._caches[1].length + width < 100:
        length = runner._caches[1].length
        if length + width > max(allocated(runner, 1)):
            reserve(runner, 1, -(-(length + width) // 16) * 16 + 16 * (pages - 1))
        block = text[length : length + width]
        with torch.inference_mode():
            found, expected = (one.verify([1], block, [width]) for one in (runner, clean))
            for one in (runner, clean):
                one.commit([1], [1 + length % width])
        assert (found - expected).abs().max() < EXACT
        seen = sliding(runner, 1).window - 1
        assert sliding(runner, 1).capacity <= 2 * seen + 16 * pages + width
    assert max(allocated(runner, 1)) >= 100


def test_a_sliding_layer_holds_windows_of_a_long_prompt(pairs: Callable[[str], Pair]) -> None:
    """All its room is reserved before the first part."""
    pair, part = pairs("gemma4"), 20
    runner, clean = pair.runner(), pair.runner()
    reserve(runner, 1, 100)
    text = tokens(100, seed=8)
    for start in range(0, 100, part):
        with torch.inference_mode():
            found, expected = (
                one.prefill([1], [text[start : start + part]], [True]) for one in (runner, clean)
            )
        assert (found - expected).abs().max() < EXACT
        seen = sliding(runner, 1).window - 1
        assert sliding(runner, 1).capacity <= 2 * seen + part
    assert sliding(runner, 1).forgotten >= 100 - part - 2 * seen
    assert max(allocated(runner, 1)) == 100


def test_release_forgets_everything(pair: Pair) -> None:
    runner = pair.runner()
    reserve(runner, 1, 64)
    reserve(runner, 2, 64)
    prefill(runner, 1, PROMPT)
    plain(runner, 1, tokens(5))
    with torch.inference_mode():
        runner.verify([1], [3], [1])
    runner.release([1, 2, 3])
    assert not (runner._caches or runner._reserved or runner._feed.contexts or runner._feed._waiting)
    assert runner._verified_taps is None


def contexts(runner: Runner, request: int) -> torch.Tensor:
    """The draft's committed keys and values of a request."""
    (context,) = runner._feed.complete([request])
    return context.data[:, :, : context.length]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The rows of each pass through the draft's context projections, request by request."""
    seen: list[list[int]] = []
    extend = DSparkDraftModel.extend

    def counted(self: DSparkDraftModel, grown: list, taps: torch.Tensor) -> None:
        seen.append([rows for _, rows in grown])
        extend(self, grown, taps)

    monkeypatch.setattr(DSparkDraftModel, "extend", counted)
    return seen


def test_waiting_taps_become_the_context_that_eager_ones_are(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tokens(21, seed=9)
    late, eager = pair.runner(), pair.runner()
    for runner in (late, eager):
        prefill(runner, 1, PROMPT[:20])
    plain(late, 1, text)
    assert late._feed.contexts[1].length == 0
    with monkeypatch.context() as patch:
        patch.setattr(feed, "WAITING_ROWS", 0)
        plain(eager, 1, text)
    assert eager._feed.contexts[1].length == 41
    assert_same(decode(late, 1, 7, 3)[0], decode(eager, 1, 7, 3)[0])
    mine, theirs = contexts(late, 1), contexts(eager, 1)
    assert mine.shape == theirs.shape and (mine - theirs).abs().max() < EXACT


def test_rounds_with_a_draft_cost_one_pass_each_in_the_commit(pair: Pair, passes: list[list[int]]) -> None:
    runner = pair.runner()
    with torch.inference_mode():
        for request in (1, 2):
            prefill(runner, request, PROMPT[:20])
        assert not passes  # the first token does not wait for the context
        runner.feed([1, 2])
        assert passes == [[20, 20]]
        passes.clear()
        for number in range(3):
            runner.draft([1, 2], [3, 4])
            assert len(passes) == number
            runner.verify([1, 2], [3, 5, 4, 6, 7], [2, 3])
            runner.commit([1, 2], [2, 1])
            assert passes[number:] == [[2, 1]]
    assert not runner._feed._waiting


def test_rounds_without_a_draft_are_fed_in_few_passes(
    pairs: Callable[[str], Pair], passes: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "WAITING_ROWS", 6)
    runner = pairs("dense").runner()
    with torch.inference_mode():
        for request in (1, 2):
            prefill(runner, request, PROMPT[:10])
        plain(runner, 2, [3, 4])
        passes.clear()
        for token in tokens(20):
            runner.verify([1, 2], [token, token], [1, 1])
            runner.commit([1, 2], [1, 1])
            waiting = [each.rows for each in runner._feed._waiting.values()]
            assert max(waiting, default=0) <= 6
    assert passes == [[7], [7], [7], [7], [7]]


def test_a_batch_of_one_age_takes_turns(
    pairs: Callable[[str], Pair], passes: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "WAITING_ROWS", 6)
    runner, ids = pairs("dense").runner(), list(range(1, 6))
    with torch.inference_mode():
        for request in ids:
            prefill(runner, request, PROMPT[:3])
        for token in tokens(9):
            runner.verify(ids, [token] * 5, [1] * 5)
            runner.commit(ids, [1] * 5)
    assert passes == [[7, 7], [8, 8], [9]]


def test_a_waiting_row_keeps_no_more_than_itself_in_memory(pair: Pair) -> None:
    """One request drafts, the other does not: the view of its row would keep the taps of both."""
    runner = pair.runner()
    with torch.inference_mode():
        for request in (1, 2):
            prefill(runner, request, PROMPT[:10])
        runner.feed([1, 2])
        runner.draft([1], [3])
        runner.verify([1, 2], [3, 5, 4, 6, 7], [4, 1])
        runner.commit([1, 2], [2, 1])
    assert list(runner._feed._waiting) == [2]
    assert keeps(runner, 2) == (1, 1)
    assert runner._verified_taps is None


def keeps(runner: Runner, request: int) -> tuple[float, int]:
    """Rows of taps that a request keeps in memory while it waits, and rows that are its own."""
    waiting = runner._feed._waiting[request]
    tensors = [taps for taps, *_ in waiting.pieces]
    width = tensors[0].shape[1] * tensors[0].element_size()
    return sum(taps.untyped_storage().nbytes() for taps in tensors) / width, waiting.rows


def three_in_rounds_without_a_draft(pair: Pair) -> Runner:
    """After three of them, which leave one tensor each for all."""
    runner = pair.runner()
    with torch.inference_mode():
        for request in (1, 2, 3):
            prefill(runner, request, PROMPT[:10])
        runner.feed([1, 2, 3])
        for token in (3, 4, 5):
            runner.verify([1, 2, 3], [token] * 3, [1] * 3)
            runner.commit([1, 2, 3], [1] * 3)
    return runner


def test_who_ends_keeps_no_rows_of_those_who_go_on(pair: Pair) -> None:
    """Rounds without a draft leave one tensor for all; a kept prefix may wait for its fork for long."""
    runner = three_in_rounds_without_a_draft(pair)
    with torch.inference_mode():
        assert keeps(runner, 1) == (9, 3)
        runner.verify([1, 2, 3], [6] * 3, [1] * 3)
        runner.commit([2, 3], [1] * 2)
    assert keeps(runner, 1) == (3, 3)


def test_who_leaves_between_two_passes_keeps_no_rows_of_others(pair: Pair) -> None:
    """A client that goes away ends its request before the next pass, which it is not in."""
    runner = three_in_rounds_without_a_draft(pair)
    with torch.inference_mode():
        for token in (6, 7):
            runner.verify([2, 3], [token] * 2, [1] * 2)
            runner.commit([2, 3], [1] * 2)
    assert keeps(runner, 1) == (3, 3)
    assert keeps(runner, 2) == (3 * 3 + 2 * 2, 5)


def test_a_fork_feeds_nothing_and_takes_waiting_rows_along(pair: Pair, passes: list[list[int]]) -> None:
    runner, clean = pair.runner(), pair.runner()
    prefill(runner, 1, PROMPT[:30])
    with torch.inference_mode():
        runner.feed([1])
        passes.clear()
        plain(runner, 1, PROMPT[30:])
        # At the present length: any cache can be forked there.
        assert runner.fork(2, 1, 40, True) == 40
    assert not passes and runner._feed._waiting[2].rows == runner._feed._waiting[1].rows == 10
    prefill(clean, 2, PROMPT)
    runner.release([1])
    assert_same(decode(runner, 2, 7, 2)[0], decode(clean, 2, 7, 2)[0])


def test_a_request_that_ends_takes_its_waiting_taps_along(pair: Pair, passes: list[list[int]]) -> None:
    runner, clean = pair.runner(), pair.runner()
    with torch.inference_mode():
        for request in (1, 2):
            prefill(runner, request, PROMPT[:10])
        runner.verify([1, 2], [3, 4], [1, 1])
        runner.commit([1, 2], [1, 1])
        runner.verify([1, 2], [5, 6], [1, 1])
        runner.release([1])  # clients are served and who ended is released before the commit
        runner.commit([2], [1])
    prefill(clean, 2, [*PROMPT[:10], 4, 6])
    assert_same(decode(runner, 2, 7, 2)[0], decode(clean, 2, 7, 2)[0])
    assert 1 not in runner._feed._waiting


def test_the_checks_notice_a_row_that_gets_lost(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    take = feed.ContextFeed.take

    def lossy(self: feed.ContextFeed, taps: Tensor, parts: list, now: Collection[int] = ()) -> None:
        take(self, taps * (taps.shape[0] > 1), parts, now)

    monkeypatch.setattr(feed.ContextFeed, "take", lossy)
    runner, clean = pair.runner(), pair.runner()
    prefill(runner, 1, PROMPT[:20])
    plain(runner, 1, [3, 4])
    prefill(clean, 1, [*PROMPT[:20], 3, 4])
    with pytest.raises(AssertionError):
        assert_same(decode(runner, 1, 7, 1)[0], decode(clean, 1, 7, 1)[0])
