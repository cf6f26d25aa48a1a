"""A request sees its own tokens, whatever cache holds them: chunks, batches, neighbours, endings."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from dspark.serve.runner import Runner
from runner_zoo import EXACT, KINDS, Pair, assert_same, decode, prefill, tokens

PROMPT = tokens(40)
ANCHOR = 7
ROUNDS = 4


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest, pairs: Callable[[str], Pair]) -> Pair:
    return pairs(request.param)


@pytest.mark.parametrize("part", [1, 3, 40])
def test_chunks_of_a_prompt_give_the_same_drafts(pair: Pair, part: int) -> None:
    whole, chunked = pair.runner(), pair.runner()
    prefill(whole, 1, PROMPT)
    prefill(chunked, 1, PROMPT, part)
    assert_same(decode(chunked, 1, ANCHOR, ROUNDS)[0], decode(whole, 1, ANCHOR, ROUNDS)[0])


@torch.inference_mode()
def step(runner: Runner, ids: list[int], number: int) -> list[tuple[Tensor, Tensor]]:
    """A round of several requests, each with its own verify length; base and target logits of each."""
    anchors = [tokens(1, seed=100 * request + number)[0] for request in ids]
    base, _ = runner.draft(ids, anchors)
    widths = [1 + (request + number) % 4 for request in ids]
    rows = [
        [anchor, *tokens(width - 1, seed=request)]
        for anchor, width, request in zip(anchors, widths, ids, strict=True)
    ]
    logits = runner.verify(ids, [token for row in rows for token in row], widths)
    runner.commit(ids, [1 + number % width for width in widths])
    return list(zip(base.chunk(len(ids)), logits.split(widths), strict=True))


@pytest.mark.parametrize("packs", [False, True], ids=["one by one", "packed, as on a GPU"])
def test_prompts_of_1_7_and_40_tokens_in_one_batch_are_as_alone(pair: Pair, packs: bool) -> None:
    """One of them ends early; a request of the same id as another that is gone starts from nothing."""
    prompts = {1: tokens(1), 2: tokens(7, seed=7), 3: PROMPT}
    together = pair.runner()
    together.packs_prompts = packs
    with torch.inference_mode():
        together.prefill(list(prompts), list(prompts.values()), [True] * 3)
    seen: dict[int, list[tuple[Tensor, Tensor]]] = {request: [] for request in prompts}
    for number in range(6):
        ids = [request for request in prompts if request != 2 or number < 2]
        if number == 2:
            together.release([2])
        for request, logits in zip(ids, step(together, ids, number), strict=True):
            seen[request].append(logits)
    for request, prompt in prompts.items():
        alone = pair.runner()
        prefill(alone, request, prompt)
        for number, (base, logits) in enumerate(seen[request]):
            ((expected_base, expected),) = step(alone, [request], number)
            assert (base - expected_base).abs().max() < EXACT
            assert (logits - expected).abs().max() < EXACT
    assert [len(rounds) for rounds in seen.values()] == [6, 2, 6]


def test_a_dropped_request_leaves_no_trace(pair: Pair) -> None:
    """Ended between a verify pass and its commit, as when its client is gone; then its id comes again."""
    runner, clean = pair.runner(), pair.runner()
    prefill(runner, 1, tokens(9, seed=1))
    with torch.inference_mode():
        runner.draft([1], [3])
        runner.verify([1], [3, 4], [2])
    runner.release([1])
    for one in (runner, clean):
        prefill(one, 1, PROMPT)
    for mine, theirs in zip(decode(runner, 1, ANCHOR, 2)[0], decode(clean, 1, ANCHOR, 2)[0], strict=True):
        assert torch.equal(mine.base, theirs.base) and torch.equal(mine.logits, theirs.logits)


def test_preemption_is_a_release_and_a_prefill_of_all_tokens(pair: Pair) -> None:
    runner, kept = pair.runner(), pair.runner()
    for one in (runner, kept):
        prefill(one, 1, PROMPT, 16)
    _, text = decode(runner, 1, ANCHOR, ROUNDS)
    decode(kept, 1, ANCHOR, ROUNDS)
    runner.release([1])
    prefill(runner, 1, PROMPT + text[:-1], 16)
    assert_same(decode(runner, 1, text[-1], ROUNDS)[0], decode(kept, 1, text[-1], ROUNDS)[0])


@torch.inference_mode()
def test_only_a_gpu_is_waited_for(pairs: Callable[[str], Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the engine would time launches in place of draft passes."""
    runner, waited = pairs("dense").runner(), []
    stream = SimpleNamespace(synchronize=lambda: waited.append("stream"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    prefill(runner, 1, PROMPT)
    runner.draft([1], [ANCHOR])
    assert not waited
    asked: list[str] = []
    monkeypatch.setattr(runner, "_wait", lambda: asked.append("wait"))
    runner.draft([1], [ANCHOR])
    runner.feed([1])
    prefill(runner, 2, PROMPT)
    assert asked == ["wait", "wait", "wait"]
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    runner.target = SimpleNamespace(device=torch.device("cuda", 0))  # type: ignore[assignment]
    runner._wait()
    assert waited == ["stream"]
