"""A fork goes on as a request that ran the tokens itself, and its source as if there were no fork."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import fork_faults
from dspark.errors import ConfigError
from dspark.serve.runner import Runner
from runner_zoo import EXACT, KINDS, Pair, assert_same, decode, plain, prefill, tokens

PROMPT = tokens(40)
BORDER = 32
"""Where the engine ends a part of the prompt for targets that fork at parts."""
ANCHOR = 7
ROUNDS = 4


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest, pairs: Callable[[str], Pair]) -> Pair:
    return pairs(request.param)


def sourced(pair: Pair, part: int = 8) -> Runner:
    """A runner whose request 1 has read the prompt: up to the border in parts, then the last one."""
    runner = pair.runner()
    prefill(runner, 1, PROMPT, [part] * (BORDER // part) + [len(PROMPT) - BORDER])
    return runner


def fork(runner: Runner, new: int, source: int, length: int, drafts: bool = True) -> int:
    with torch.inference_mode():
        return runner.fork(new, source, length, drafts)


def check_fork(pair: Pair, length: int, after: list[int]) -> int:
    """Forks request 1 at `length`, lets the fork read `after`, and both decode; returns what was taken."""
    runner, clean = sourced(pair), pair.runner()
    taken = fork(runner, 2, 1, length)
    assert taken <= length
    if taken == 0:
        return 0
    # The fork first, then the source: neither may notice the other.
    prefill(runner, 2, after)
    prefill(clean, 2, PROMPT[:taken] + after)
    forked, _ = decode(runner, 2, ANCHOR, ROUNDS)
    assert_same(forked, decode(clean, 2, ANCHOR, ROUNDS)[0])
    prefill(clean, 1, PROMPT)
    assert_same(decode(runner, 1, ANCHOR, ROUNDS)[0], decode(clean, 1, ANCHOR, ROUNDS)[0])
    # And in turn: the source has grown now, and is gone at the end.
    assert_same(decode(runner, 2, ANCHOR, 1)[0], decode(clean, 2, ANCHOR, 1)[0])
    runner.release([1])
    assert_same(decode(runner, 2, ANCHOR, 1)[0], decode(clean, 2, ANCHOR, 1)[0])
    return taken


@pytest.mark.parametrize("length", [1, 2, 15, 16, 31, 32, 33, 39, 40, 90])
def test_a_fork_equals_a_prefill_of_the_same_tokens(pair: Pair, length: int) -> None:
    taken = check_fork(pair, length, tokens(6, seed=1))
    if pair.target.forks_at_parts:
        assert taken == (40 if length >= 40 else BORDER if length >= BORDER else 0)
    else:
        assert taken == min(length, 40)


def test_only_recurrent_states_ask_for_parts(pairs: Callable[[str], Pair]) -> None:
    assert [kind for kind in KINDS if pairs(kind).runner().forks_at_parts] == ["hybrid"]


def test_a_fork_at_the_end_of_what_was_generated(pair: Pair) -> None:
    """The next turn of a chat: its prompt begins with the text of the request before."""
    runner, clean = sourced(pair), pair.runner()
    _, text = decode(runner, 1, ANCHOR, ROUNDS)
    committed = PROMPT + text[:-1]
    assert fork(runner, 2, 1, len(committed)) == len(committed)
    prefill(runner, 2, tokens(5, seed=2))
    prefill(clean, 2, committed + tokens(5, seed=2))
    assert_same(decode(runner, 2, ANCHOR, ROUNDS)[0], decode(clean, 2, ANCHOR, ROUNDS)[0])


def test_a_fork_of_a_fork(pair: Pair) -> None:
    runner, clean = sourced(pair), pair.runner()
    assert fork(runner, 2, 1, BORDER) == BORDER
    runner.release([1])
    prefill(runner, 2, tokens(9, seed=3))
    assert fork(runner, 3, 2, BORDER + 8) == (BORDER if pair.target.forks_at_parts else BORDER + 8)
    taken = BORDER if pair.target.forks_at_parts else BORDER + 8
    prefill(runner, 3, tokens(4, seed=4))
    prefill(clean, 3, (PROMPT[:BORDER] + tokens(9, seed=3))[:taken] + tokens(4, seed=4))
    assert_same(decode(runner, 3, ANCHOR, ROUNDS)[0], decode(clean, 3, ANCHOR, ROUNDS)[0])


def test_samples_that_share_a_prompt(pair: Pair) -> None:
    """Forked where the prompt is through, and decoded side by side in one batch."""
    runner, clean = sourced(pair), pair.runner()
    assert [fork(runner, new, 1, len(PROMPT)) for new in (2, 3)] == [len(PROMPT)] * 2
    prefill(clean, 1, PROMPT)
    anchors = [7, 3, 11]
    with torch.inference_mode():
        base, _ = runner.draft([1, 2, 3], anchors)
        rows = [token for anchor in anchors for token in (anchor, *tokens(3, seed=anchor))]
        logits = runner.verify([1, 2, 3], rows, [4, 4, 4])
        runner.commit([1, 2, 3], [1, 3, 4])
    gamma = base.shape[0] // 3
    for index, anchor in enumerate(anchors):
        alone = pair.runner()
        prefill(alone, 1, PROMPT)
        with torch.inference_mode():
            expected, _ = alone.draft([1], [anchor])
            theirs = alone.verify([1], rows[4 * index : 4 * index + 4], [4])
            alone.commit([1], [(1, 3, 4)[index]])
        assert (base[gamma * index : gamma * (index + 1)] - expected).abs().max() < EXACT
        assert (logits[4 * index : 4 * index + 4] - theirs).abs().max() < EXACT
        assert_same(decode(runner, 1 + index, 5, 2)[0], decode(alone, 1, 5, 2)[0])


@pytest.mark.parametrize("length", [BORDER, len(PROMPT)])
def test_rows_that_are_not_committed_never_leak(pair: Pair, length: int) -> None:
    """Forked between a verify pass and its commit; the source then keeps what it wants to keep."""
    runner, clean = sourced(pair), pair.runner()
    block = tokens(4, seed=5)
    with torch.inference_mode():
        runner.draft([1], block[:1])
        runner.verify([1], block, [4])
    assert fork(runner, 2, 1, length) == length
    with torch.inference_mode():
        runner.commit([1], [2])
    prefill(clean, 1, PROMPT + block[:2])
    prefill(clean, 2, [*PROMPT[:length], 1])
    prefill(runner, 2, [1])
    for request in (2, 1):
        assert_same(decode(runner, request, ANCHOR, 2)[0], decode(clean, request, ANCHOR, 2)[0])


def test_waiting_taps_are_in_the_fork(pair: Pair) -> None:
    """Of rounds that drafted nothing: the fork's context has no holes, nor has the source's."""
    runner, clean = sourced(pair), pair.runner()
    text = tokens(7, seed=6)
    plain(runner, 1, text)
    assert fork(runner, 2, 1, 47) == 47
    prefill(clean, 1, PROMPT + text)
    expected, _ = decode(clean, 1, ANCHOR, 2)
    for request in (1, 2):
        assert_same(decode(runner, request, ANCHOR, 2)[0], expected)


def test_a_preempted_request_may_come_back_through_a_fork(pair: Pair) -> None:
    runner, kept = sourced(pair), sourced(pair)
    assert fork(runner, 9, 1, BORDER) == BORDER
    _, text = decode(runner, 1, ANCHOR, ROUNDS)
    decode(kept, 1, ANCHOR, ROUNDS)
    runner.release([1])
    assert fork(runner, 1, 9, BORDER) == BORDER
    prefill(runner, 1, (PROMPT + text[:-1])[BORDER:])
    assert_same(decode(runner, 1, text[-1], ROUNDS)[0], decode(kept, 1, text[-1], ROUNDS)[0])


def test_gemma4_forks_only_where_the_window_is_still_held(pairs: Callable[[str], Pair]) -> None:
    pair = pairs("gemma4")
    found = {}
    for length in range(1, 61):
        runner, clean = pair.runner(), pair.runner()
        for end in range(16, 61 + 16, 16):
            runner.reserve([1], [min(end, 60)])
            part = tokens(60)[end - 16 : min(end, 60)]
            prefill(runner, 1, part)
        sliding = next(store for store in runner._caches[1].stores.values() if hasattr(store, "forgotten"))
        assert sliding.forgotten > 16
        found[length] = fork(runner, 2, 1, length)
        assert found[length] == (length if length >= sliding.forgotten + sliding.window - 1 else 0)
        if found[length]:
            prefill(runner, 2, [3, 1])
            prefill(clean, 2, [*tokens(60)[:length], 3, 1])
            assert_same(decode(runner, 2, ANCHOR, 2)[0], decode(clean, 2, ANCHOR, 2)[0])
    assert 20 < sum(taken == 0 for taken in found.values()) < 50


def test_what_cannot_be_forked(pairs: Callable[[str], Pair]) -> None:
    runner = sourced(pairs("dense"))
    with pytest.raises(ConfigError, match="request 3 cannot be made from request 2: 2 is unknown"):
        fork(runner, 3, 2, 8)
    assert fork(runner, 2, 1, 8) == 8
    with pytest.raises(ConfigError, match="request 2 cannot be made from request 1: 2 is known already"):
        fork(runner, 2, 1, 8)
    assert fork(runner, 3, 1, 0) == 0
    with torch.inference_mode():
        runner.prefill([4], [PROMPT], [False])
    assert fork(runner, 5, 4, 8) == 0, "taps that were never kept"
    assert fork(runner, 5, 4, 8, drafts=False) == 8
    with pytest.raises(ConfigError, match="3 is unknown"):
        fork(runner, 6, 3, 8)


def test_a_fork_need_not_draft(pair: Pair) -> None:
    runner, clean = sourced(pair), Runner(pair.target, None)
    assert fork(runner, 2, 1, BORDER, drafts=False) == BORDER
    assert 2 not in runner._feed.contexts
    with torch.inference_mode():
        found = runner.prefill([2], [PROMPT[BORDER:]], [False])
        expected = clean.prefill([1], [PROMPT], [False])
    assert (found - expected).abs().max() < EXACT


@pytest.mark.parametrize(
    ("kind", "fault", "length"),
    [
        ("dense", fork_faults.one_row_less, 20),
        ("dense", fork_faults.shared_memory, 20),
        ("windows", fork_faults.one_row_less, 20),
        ("windows", fork_faults.shared_memory, 20),
        ("gemma4", fork_faults.one_row_less, 20),
        ("gemma4", fork_faults.shared_memory, 20),
        ("adapter", fork_faults.one_row_less, 20),
        ("hybrid", fork_faults.one_row_less, BORDER),
        ("hybrid", fork_faults.shared_memory, BORDER),
        ("hybrid", fork_faults.no_conv, BORDER),
        ("hybrid", fork_faults.no_state, BORDER),
        ("hybrid", fork_faults.present_state, BORDER),
        ("hybrid", fork_faults.shared_state, 40),
    ],
)
def test_the_checks_notice_a_fork_that_is_wrong(
    pairs: Callable[[str], Pair],
    kind: str,
    fault: Callable[[pytest.MonkeyPatch], None],
    length: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = pairs(kind)
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check_fork(pair, length, tokens(6, seed=1))
