"""`stats` and `info`: every key is explained, and the numbers add up, also while everything is busy."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

from dspark import DSparkDecoder, SamplingParams
from load_driver import check_rest

PROMPT = "def read(self, size):\n"
Decoders = Callable[..., DSparkDecoder]


def test_every_key_is_explained(decoders: Decoders) -> None:
    stats = decoders().stats()
    named = set(re.findall(r"`(\w+)`", DSparkDecoder.stats.__doc__ or ""))
    keys = set(stats) | set(stats["pages"])
    assert keys <= named, f"not in the docstring: {keys - named}"
    assert named - keys == {"None"}, f"named and not there: {named - keys}"
    assert set(stats["inter_token_s"]) == set(stats["time_to_first_token_s"]) == {"p50", "p90", "p99"}
    assert stats["inter_token_s"]["p50"] is None or stats["tokens"] > 0


def test_a_fresh_decoder_has_done_nothing() -> None:
    with DSparkDecoder.from_pretrained("tiny", "tiny-draft", policy="fixed", max_kv_tokens=4096) as decoder:
        stats = decoder.stats()
        assert stats.pop("pages") == {"total": 256, "used": 0, "kept": 0}
        assert stats.pop("inter_token_s") == stats.pop("time_to_first_token_s")
        assert stats.pop("acceptance_by_position") == [] and stats.pop("draft_failure") is None
        assert set(stats.values()) == {0}


def test_totals_are_those_of_the_results(decoders: Decoders) -> None:
    decoder = decoders(max_queue_size=100)
    before = check_rest(decoder)
    results = decoder.generate([PROMPT, "x = ", [9999]] * 8, SamplingParams(temperature=0.0, max_tokens=20))
    after = check_rest(decoder)
    good = [r for r in results if r.error is None]

    def grown(key: str) -> Any:
        return after[key] - before[key]

    assert grown("finished") == len(good) == 16 and grown("refused") == 0
    assert grown("tokens") == sum(len(r.token_ids) for r in good)
    for key in ("drafted", "verified", "accepted"):
        assert grown(key) == sum(getattr(round_, key) for r in good for round_ in r.rounds)
    assert grown("rounds") == sum(len(r.rounds) for r in good) >= grown("passes") > 0
    parts = ("prefill_s", "draft_s", "chain_s", "verify_s", "accept_s")
    assert 0 < sum(map(grown, parts)) <= grown("round_s")
    latency = after["time_to_first_token_s"]
    assert 0 < latency["p50"] <= latency["p90"] <= latency["p99"]


def test_nobody_is_missing_while_the_engine_is_busy(decoders: Decoders) -> None:
    """Whoever looks at any moment finds every unfinished request either queued or running."""
    decoder = decoders(max_batch_size=2)
    check_rest(decoder)
    before, count = decoder.stats()["finished"], 12
    params = SamplingParams(temperature=0.0, max_tokens=40)
    streams = [decoder.stream([3 + k] * 60, params) for k in range(count)]
    readers = [threading.Thread(target=lambda stream=stream: list(stream)) for stream in streams]
    busy = 0

    def look() -> bool:
        nonlocal busy
        stats = decoder.stats()
        assert stats["queued"] + stats["running"] + stats["finished"] - before == count, stats
        is_busy = stats["finished"] - before < count
        busy += is_busy
        return is_busy

    for reader in readers:  # on a busy machine everything is over before the last of them runs
        look()
        reader.start()
    while look():
        pass
    for reader in readers:
        reader.join(30)
    assert busy > 0


def test_info_says_which_options_are_in_force(decoders: Decoders) -> None:
    info = decoders(max_queue_size=100).info()
    assert info["max_queue_size"] == 100 and info["prefill_chunk_size"] == 512
    assert info["max_model_len"] == 2048 and info["max_kv_tokens"] >= 2048
