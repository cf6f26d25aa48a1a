"""Random loads, in float64, with a cache so small that requests are preempted and prefixes evicted often."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from dspark import DSparkDecoder
from dspark.core import CostTable
from load_driver import check, check_rest, draw_jobs, rounds_of, run_jobs
from places import DATA

TINY = ("tiny", "tiny-draft")
HYBRID = (DATA / "hybrid" / "target", DATA / "hybrid" / "draft-nested")
TABLE = CostTable([(1, 1e-3), (8, 1.3e-3), (32, 2.5e-3), (64, 5e-3)])
POLICIES: dict[str, dict[str, Any]] = {
    "fixed": {"policy": "fixed"},
    "threshold": {"policy": "threshold", "confidence_threshold": 0.6},
    "throughput": {"policy": "throughput", "cost_table": TABLE},
}
SMALL = {
    "dtype": "float64",
    "device": "cpu",
    "max_model_len": 160,
    "max_kv_tokens": 208,
    "max_batch_size": 8,
    "prefill_chunk_size": 24,
}


def run(pair: tuple[str | Path, str | Path], count: int, seed: int, acceptance: str, policy: str) -> None:
    options: dict[str, Any] = {**SMALL, "acceptance": acceptance}
    if pair == HYBRID:  # 60 requests seldom need more than this at once
        options["max_kv_tokens"] = 144
    with (
        DSparkDecoder.from_pretrained(*pair, **options, **POLICIES[policy], max_queue_size=24) as decoder,
        DSparkDecoder.from_pretrained(pair[0], **{**options, "max_batch_size": 1}) as alone,
    ):
        # What never happened would prove nothing, and when requests meet is up to the machine: until it did.
        for again in range(5):
            jobs = draw_jobs(random.Random(seed + 1000 * again), count, decoder)
            run_jobs(decoder, jobs, seed)
            stats = check_rest(decoder)
            counts = check(jobs, alone, any_temperature=acceptance == "coupled")
            if all(stats[name] > 0 for name in ("accepted", "preemptions", "reused_tokens")):
                break
        else:
            pytest.fail(f"nobody was preempted, or nothing was reused: {stats}")
        # Under the ratio rules only the jobs at temperature 0 can be compared.
        enough = count // 5 if acceptance == "coupled" else count // 8
        assert counts["whole"] > enough and counts["cut"] > 0 and counts["bad"] > 0, counts
        assert sum(r.accepted for r in rounds_of(jobs)) <= stats["accepted"]


@pytest.mark.parametrize(
    ("pair", "count", "acceptance", "policy"),
    [
        (TINY, 100, "coupled", "throughput"),
        (TINY, 80, "rejection", "fixed"),
        (TINY, 60, "block", "threshold"),
        (HYBRID, 60, "coupled", "fixed"),
    ],
    ids=str,
)
def test_a_random_load(pair: Any, count: int, acceptance: str, policy: str) -> None:
    run(pair, count, 7, acceptance, policy)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("acceptance", ["rejection", "block", "coupled"])
@pytest.mark.parametrize(("pair", "count"), [(TINY, 600), (HYBRID, 250)], ids=str)
def test_a_long_random_load(pair: Any, count: int, acceptance: str, policy: str) -> None:
    for seed in range(2):
        run(pair, count, 100 + seed, acceptance, policy)
