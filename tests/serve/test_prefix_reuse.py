"""A prompt that was seen before: its caches come back, the draft's context with the target's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import adapter_zoo
import gemma4_zoo
import random_pair
from dspark import DSparkDecoder, SamplingParams
from dspark.attention.cache import KVStore
from dspark.serve.feed import ContextFeed
from places import DATA

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
Make = Callable[..., DSparkDecoder]


def assert_same(found: Any, expected: Any) -> None:
    """Text, what was drafted and kept, and what the draft thought of it."""
    assert found.token_ids == expected.token_ids
    assert len(found.rounds) == len(expected.rounds)
    for mine, theirs in zip(found.rounds, expected.rounds, strict=True):
        assert (mine.drafted, mine.accepted) == (theirs.drafted, theirs.accepted)
        assert mine.confidence == pytest.approx(theirs.confidence, abs=1e-6)


@pytest.fixture(scope="module", params=["dense", "hybrid", "gemma4", "adapter"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Make, int]:
    """Makes fresh decoders of a pair in float64; and how many token ids there are."""
    path = tmp_path_factory.mktemp(request.param)
    pair: tuple[str | Path, str | Path] = ("tiny", "tiny-draft")
    vocabulary = 300
    if request.param == "hybrid":
        pair = (DATA / "hybrid" / "target", DATA / "hybrid" / "draft-nested")
    elif request.param == "gemma4":
        vocabulary = 7
        # A window as long as these texts: what a sliding layer has forgotten cannot be forked.
        changes = {"vocab_size": 7, "max_position_embeddings": 128, "sliding_window": 64}
        target = gemma4_zoo.write_target(path / "target", **changes)
        pair = (target, gemma4_zoo.write_draft(path / "draft", 4, vocab_size=7, mask_token_id=0))
    elif request.param == "adapter":
        vocabulary = adapter_zoo.VOCAB
        target = adapter_zoo.write(path / "target", "gpt2")
        pair = (target, random_pair.write_draft(path / "draft", vocabulary, block_size=5))

    def make(**options: Any) -> DSparkDecoder:
        return DSparkDecoder.from_pretrained(*pair, device="cpu", dtype="float64", policy="fixed", **options)

    return make, vocabulary


def prompt(vocabulary: int, count: int = 40, seed: int = 0) -> list[int]:
    return [(7 * i * i + 11 * i + 5 * seed) % vocabulary for i in range(count)]


def test_the_same_prompt_twice_has_the_same_acceptance(made: tuple[Make, int]) -> None:
    make, vocabulary = made
    with make() as decoder:
        first, second = (decoder.generate(prompt(vocabulary), GREEDY) for _ in range(2))
        assert_same(second, first)
        assert decoder.stats()["accepted"] > 0
        assert decoder.stats()["reused_tokens"] >= 32


def test_the_next_turn_of_a_chat(made: tuple[Make, int]) -> None:
    """Its prompt begins with the prompt and the text of the request before."""
    make, vocabulary = made
    with make() as decoder:
        first = decoder.generate(prompt(vocabulary), GREEDY)
        turn = [*prompt(vocabulary), *first.token_ids, 1, 2, 3]
        second = decoder.generate(turn, GREEDY)
        assert decoder.stats()["reused_tokens"] >= 48
    with make() as clean:
        assert_same(second, clean.generate(turn, GREEDY))


def test_samples_of_one_prompt_are_those_of_separate_requests(made: tuple[Make, int]) -> None:
    make, vocabulary = made
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=5, n=3, ignore_eos=True)
    with make(acceptance="coupled") as decoder:
        together = decoder.generate(prompt(vocabulary), params)
        assert decoder.stats()["reused_tokens"] >= 64
    with make(acceptance="coupled", max_batch_size=1, max_kv_tokens=64) as decoder:
        assert [r.token_ids for r in decoder.generate(prompt(vocabulary), params)] == [
            r.token_ids for r in together
        ]
    assert len({r.token_ids for r in together}) == 3


def test_preemption_loses_nothing(made: tuple[Make, int]) -> None:
    """More requests than the cache has room for: whoever has to step back goes on as if it had not."""
    make, vocabulary = made
    prompts = [prompt(vocabulary, 17, seed) for seed in range(5)]
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    with make(max_kv_tokens=128, max_model_len=64) as decoder:
        crowded = decoder.generate(prompts, params)
        assert decoder.stats()["preemptions"] > 0
    with make() as decoder:
        for text, alone in zip(crowded, prompts, strict=True):
            assert text.token_ids == decoder.generate(alone, params).token_ids


def test_the_comparison_notices_a_context_that_does_not_come_back(
    made: tuple[Make, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text stays the target's, so only drafts and confidences show it."""
    fork = ContextFeed.fork

    def empty(self: ContextFeed, new: int, *how: int) -> None:
        fork(self, new, *how)
        self.contexts[new].data.zero_()

    monkeypatch.setattr(ContextFeed, "fork", empty)
    make, vocabulary = made
    with make() as decoder:
        first, second = (decoder.generate(prompt(vocabulary), GREEDY) for _ in range(2))
    assert first.token_ids == second.token_ids
    with pytest.raises(AssertionError):
        assert_same(second, first)


@pytest.mark.parametrize("seed", [pytest.param(3, id="copy-of-a-prefix"), pytest.param(4, id="afresh")])
def test_kept_prefixes_make_room_for_a_prompt(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Memory that a prompt lacks is asked for again behind them, be it for a copy of a prefix or afresh."""
    with DSparkDecoder.from_pretrained("tiny", "tiny-draft", device="cpu", dtype="float64") as decoder:
        clean = [decoder.generate(prompt(300, seed=kept), GREEDY).token_ids for kept in (1, 2, 3)]
        # One at least is left out: the numbers may be those from before the last one was kept.
        before = decoder.stats()["pages"]["kept"]
        resize, calls = KVStore._resize, []

        def fails_once(store: KVStore, capacity: int) -> None:
            calls.append(capacity)
            if len(calls) == 1:
                raise RuntimeError("out of memory")
            resize(store, capacity)

        monkeypatch.setattr(KVStore, "_resize", fails_once)
        found = decoder.generate(prompt(300, seed=seed), GREEDY)
        assert found.finish_reason == "length" and len(calls) > 1
        assert seed == 4 or found.token_ids == clean[2]
        assert decoder.stats()["pages"]["kept"] < before
