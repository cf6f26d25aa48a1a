"""Samples that share a prompt, and what the statistics say of latency."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
