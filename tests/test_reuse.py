"""Requests that share a prompt, one decoder with little memory, and what its statistics say of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from dspark import DSparkDecoder, SamplingParams

PROMPT = "def read(self, size):\n    if size is None:\n        return self.file.read()\n"
Decoders = Callable[..., DSparkDecoder]


@pytest.fixture
def decoders() -> Iterator[Decoders]:
    """Makes decoders that nobody has used before."""
    with ExitStack() as stack:

        def make(draft: str | None = "tiny-draft", **options: Any) -> DSparkDecoder:
            # Rounds that follow the clock could not be compared.
            decoder = DSparkDecoder.from_pretrained("tiny", draft, device="cpu", policy="fixed", **options)
            return stack.enter_context(decoder)

        yield make


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 40, "ignore_eos": True, **changes})


def test_the_same_prompt_twice_has_the_same_acceptance(decoders: Decoders) -> None:
    decoder = decoders(dtype="float64")
    first, second = (decoder.generate(PROMPT, greedy()) for _ in range(2))
    assert second.token_ids == first.token_ids
    rounds = [[(r.drafted, r.verified, r.accepted) for r in result.rounds] for result in (first, second)]
    assert rounds[0] == rounds[1] and any(accepted for _, _, accepted in rounds[0])
    assert decoder.stats()["reused_tokens"] == len(first.prompt_token_ids) - 1


def test_a_text_goes_on_where_it_ended(decoders: Decoders) -> None:
    decoder = decoders(dtype="float64")
    first = decoder.generate(PROMPT, greedy())
    longer = [*first.prompt_token_ids, *first.token_ids, 10]
    again = decoder.generate(longer, greedy())
    assert decoder.stats()["reused_tokens"] >= len(longer) - 10
    assert again.token_ids == decoders(dtype="float64").generate(longer, greedy()).token_ids


@pytest.mark.parametrize("acceptance", ["rejection", "coupled"])
def test_samples_of_one_prompt_share_it(decoders: Decoders, acceptance: str) -> None:
    options: dict[str, Any] = {"dtype": "float64", "acceptance": acceptance}
    params = SamplingParams(n=3, seed=5, temperature=1.0, max_tokens=30, ignore_eos=True)
    decoder = decoders(**options)
    together: Any = decoder.generate(PROMPT, params)
    shared = len(together[0].prompt_token_ids) - 1
    assert decoder.stats()["reused_tokens"] == 2 * shared
    again: Any = decoder.generate(PROMPT, params)
    assert [r.token_ids for r in together] == [r.token_ids for r in again]


def test_little_memory_costs_time_and_nothing_else(decoders: Decoders) -> None:
    prompts = [PROMPT[start:] for start in range(6)]
    decoder = decoders(dtype="float64", draft=None)
    results = [decoder.generate(prompt, greedy(max_tokens=90)) for prompt in prompts]
    alone = [result.token_ids for result in results]
    most = max(len(result.prompt_token_ids) for result in results) + 90
    decoder = decoders(dtype="float64", max_kv_tokens=2 * (most // 16 + 1) * 16)
    with ThreadPoolExecutor(len(prompts)) as threads:
        together = threads.map(lambda prompt: decoder.generate(prompt, greedy(max_tokens=90)), prompts)
        results = list(together)
    assert [result.token_ids for result in results] == alone
    assert decoder.stats()["preemptions"] > 0
    # Clients are told first: the caches of the last one are put away after it has its result.
    while (pages := decoder.stats()["pages"])["used"] > pages["kept"]:
        time.sleep(0.001)
    assert 0 < pages["used"] <= pages["total"]


def test_statistics_of_latency(decoders: Decoders) -> None:
    decoder = decoders()
    unknown = {"p50": None, "p90": None, "p99": None}
    assert decoder.stats()["time_to_first_token_s"] == unknown == decoder.stats()["inter_token_s"]
    result = decoder.generate(PROMPT, greedy())
    stats = decoder.stats()
    first = result.timing.time_to_first_token_s
    assert first is not None and stats["time_to_first_token_s"]["p50"] == pytest.approx(first, rel=0.02)
    assert 0 < stats["inter_token_s"]["p50"] <= stats["inter_token_s"]["p99"]
    assert stats["refused"] == stats["preemptions"] == stats["prefilling"] == stats["queued"] == 0
    assert 0 < stats["feed_s"] < stats["draft_s"]
