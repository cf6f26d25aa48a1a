"""Options of a decoder and parameters of a request: what is accepted, and what is refused by name."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import fields
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspark import (
    CapacityError,
    CheckpointError,
    ConfigError,
    DSparkDecoder,
    RequestError,
    SamplingParams,
    _core,
)
from dspark.core import Calibration, CostTable
from dspark.errors import shown
from dspark.pretrained import resolve
from random_pair import write_draft, write_target

Decoders = Callable[..., DSparkDecoder]
PROMPT = "def read(self, size):\n"
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)

REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("policy must be", {"policy": "adaptive"}),
    ("acceptance must be", {"acceptance": "typical"}),
    ("needs a confidence_threshold between 0 and 1", {"policy": "threshold"}),
    ("needs a confidence_threshold between 0 and 1", {"policy": "threshold", "confidence_threshold": 1.5}),
    ("needs a confidence_threshold between 0 and 1", {"policy": "threshold", "confidence_threshold": "a"}),
    ('for policy "threshold"', {"confidence_threshold": 0.5}),
    ('budget_lag is for policy "throughput"', {"policy": "fixed", "budget_lag": 1}),
    ("budget_lag must be", {"budget_lag": 0}),
    ("out of range", {"block_size": 9}),
    ("block_size must be", {"block_size": 0}),
    ("markov_candidates must be", {"markov_candidates": 0}),
    ("max_batch_size must be", {"max_batch_size": -1}),
    ("max_batch_size must be", {"max_batch_size": 2**70}),
    ("block_size must be", {"block_size": "3"}),
    ("block_size must be", {"block_size": 10**5000}),
    ("max_batch_size must be", {"max_batch_size": True}),
    ("max_batch_size must be", {"max_batch_size": np.float64(8)}),
    ("policy must be", {"policy": 10**5000}),
    ("acceptance must be", {"acceptance": 10**5000}),
    ("needs a confidence_threshold", {"policy": "threshold", "confidence_threshold": 10**5000}),
    ("policy must be", {"policy": None}),
    ("acceptance must be", {"acceptance": None}),
    ("device must be", {"device": None}),
    ("device must be", {"device": "meta"}),
    ("prefill_chunk_size must be", {"prefill_chunk_size": 0}),
    ('for policy "throughput"', {"policy": "fixed", "cost_table": CostTable([(1, 0.1)])}),
    ("more than the models' window of 2048", {"max_model_len": 4096}),
    ("device must be", {"device": "gpu9"}),
    ("dtype must be", {"dtype": "int8"}),
    ("3 temperatures, but the draft's block has 7 positions", {"calibration": Calibration([1.0] * 3, 3)}),
    ("9 temperatures, but the draft's block has 7 positions", {"calibration": Calibration([1.0] * 9, 9)}),
]


@pytest.mark.parametrize(("message", "options"), REFUSED, ids=lambda value: shown(value)[:40])
def test_refused(message: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=message):
        DSparkDecoder.from_pretrained("tiny", "tiny-draft", **options)


def test_whole_numbers_may_be_numpys(decoders: Decoders) -> None:
    options = {"max_batch_size": np.int64(2), "block_size": np.int32(3), "max_model_len": np.uint16(64)}
    decoder = decoders(**options)
    assert len(decoder.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=9)).token_ids) == 9
    info = decoder.info()
    assert {name: info[name] for name in options} == options
    json.dumps(info)


def test_the_core_refuses_throughput_without_costs(decoders: Decoders) -> None:
    """The decoder measures a table or is given one; the core neither does without nor verifies everything."""
    sizes = {"gamma": 7, "block_size": 7, "max_batch_size": 1, "max_kv_tokens": 64}
    with pytest.raises(ConfigError, match='policy "throughput" needs a cost table'):
        _core.Engine(object(), {}, rule="rejection", policy="throughput", **sizes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match='policy "throughput" needs a cost table'):
        decoders(max_batch_size=1)._engine.core.set_policy("throughput")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="no GPU"):
        DSparkDecoder.from_pretrained("tiny", device="cuda")


def test_unknown_models_are_refused() -> None:
    with pytest.raises(CheckpointError, match="tiny"):
        DSparkDecoder.from_pretrained("no-such-model")


@pytest.mark.parametrize("path", ["~no-such-user-of-ours/c.json", "x" * 5000], ids=shown)
def test_a_calibration_that_cannot_be_looked_at(path: str) -> None:
    with pytest.raises(CheckpointError, match=r"no such home directory|cannot be accessed: File name"):
        DSparkDecoder.from_pretrained("tiny", "tiny-draft", policy="fixed", calibration=path)


def test_a_request_that_can_never_fit_the_cache(decoders: Decoders) -> None:
    decoder = decoders(max_kv_tokens=64)
    results = decoder.generate(
        [PROMPT, PROMPT], [SamplingParams(max_tokens=100), GREEDY.__class__(max_tokens=9)]
    )
    assert results[0].finish_reason == "error" and "max_kv_tokens = 64" in str(results[0].error)
    assert len(results[1].token_ids) == 9


def test_the_budget_may_come_from_earlier_rounds(decoders: Decoders) -> None:
    """What it plans is tested in the core; here it is what runs."""
    params = SamplingParams(temperature=0.7, max_tokens=24, seed=3, ignore_eos=True)
    options: dict[str, Any] = {"policy": "throughput", "cost_table": CostTable([(1, 0.01)]), "budget_lag": 2}
    decoder = decoders(**options)
    assert decoder.info()["budget_lag"] == 2
    result = decoder.generate(PROMPT, params)
    # Rounds correct the table, so on a busy machine later ones may go without a draft.
    assert len(result.token_ids) == 24 and result.rounds[0].drafted
    assert len(decoders(draft=None, **options).generate(PROMPT, params).token_ids) == 24
    with pytest.raises(ConfigError, match='budget_lag is for policy "throughput"'):
        decoder._engine.core.set_policy("fixed", budget_lag=2)


def test_a_request_without_max_tokens_fits_a_small_cache(decoders: Decoders) -> None:
    decoder = decoders(max_kv_tokens=100)
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    result = decoder.generate([1, 2, 3], params)
    assert (len(result.token_ids), result.finish_reason) == (96 - 3, "length")
    with pytest.raises(CapacityError, match="max_kv_tokens = 100"):
        decoder.generate([1] * 96, params)


def test_throughput_follows_its_table(decoders: Decoders) -> None:
    whole = decoders().generate(PROMPT, GREEDY)
    flat = decoders(policy="throughput", cost_table=CostTable([(1, 0.01)])).generate(PROMPT, GREEDY)
    steep = decoders(policy="throughput", cost_table=CostTable([(1, 0.01), (2, 1.0)])).generate(
        PROMPT, GREEDY
    )
    assert flat.token_ids == steep.token_ids == whole.token_ids
    assert all(r.verified == r.drafted for r in flat.rounds)
    # No pass is that slow: the table is corrected by the rounds, so it holds for the first of them only.
    assert all(r.drafted == 0 for r in steep.rounds[:8])
    assert "rounds without a draft: plain decoding was estimated faster" in steep.speculation


@pytest.mark.parametrize(
    ("acceptance", "temperature"), [("rejection", 0.0), ("rejection", 0.7), ("block", 0.7), ("coupled", 0.7)]
)
def test_where_tokens_cost_nothing_all_are_drafted_and_verified(acceptance: str, temperature: float) -> None:
    """However unlikely they are. All passes of whole blocks are equally wide, so that what they really take
    leaves the table flat, and it takes rounds by the hundred to correct a table that is off by 15 powers of
    ten."""
    params = SamplingParams(temperature=temperature, max_tokens=100, seed=1, ignore_eos=True)
    with DSparkDecoder.from_pretrained(
        "tiny", "tiny-draft", acceptance=acceptance, cost_table=CostTable([(1, 1e12)])
    ) as decoder:
        result = decoder.generate(PROMPT, params)
    whole, said = [], 1
    for round_ in result.rounds:
        if params.max_tokens - said > 7:  # type: ignore[operator]
            whole.append((round_.drafted, round_.verified))
        said += round_.committed
    # The first 16 blocks are verified whatever the plan says.
    assert len(whole) > 20 and set(whole) == {(7, 7)}, whole
    assert any(min(round_.confidence) < 0.5 for round_ in result.rounds[:20])


@pytest.mark.parametrize("acceptance", ["rejection", "block", "coupled"])
def test_throughput_in_a_sampled_batch(decoders: Decoders, acceptance: str) -> None:
    table = CostTable([(n, 0.01 + 0.001 * n) for n in range(1, 64)])
    decoder = decoders(policy="throughput", cost_table=table, acceptance=acceptance)
    params = [SamplingParams(temperature=1.0, max_tokens=30 + i, seed=i) for i in range(6)]
    results = decoder.generate([PROMPT] * 6, params)
    assert [len(r.token_ids) for r in results] == [30 + i for i in range(6)]
    verified = {r.verified for result in results for r in result.rounds}
    assert len(verified) > 1, "the table has a say"


def test_calibration_changes_confidences_and_nothing_else(decoders: Decoders) -> None:
    raw = decoders().generate(PROMPT, GREEDY)
    scaled = decoders(calibration=Calibration([2.0] * 7, 7)).generate(PROMPT, GREEDY)
    assert scaled.token_ids == raw.token_ids
    for c, d in zip(raw.rounds[0].confidence, scaled.rounds[0].confidence, strict=True):
        odds = (c / (1 - c)) ** 0.5
        assert d == pytest.approx(odds / (1 + odds), abs=1e-5)


def test_a_draft_trained_wider_than_it_is_served(tmp_path: Path) -> None:
    """Trained at 16, served at 7: 1 and 3 are prefixes of the 7, 9 runs 9, 20 is refused."""
    shutil.copytree(resolve("tiny-draft", "draft"), tmp_path / "draft")
    path = tmp_path / "draft" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "training_block_size": 16}))
    rounds = {}
    for block_size in (1, 3, 7, 9):
        with DSparkDecoder.from_pretrained(
            "tiny", tmp_path / "draft", policy="fixed", block_size=block_size
        ) as decoder:
            result = decoder.generate(PROMPT, GREEDY)
            rounds[block_size] = result.rounds
            assert max(r.drafted for r in result.rounds) == block_size
    first = rounds[7][0].confidence
    for block_size in (1, 3):
        assert rounds[block_size][0].confidence == pytest.approx(first[:block_size], abs=1e-5)
    with pytest.raises(ConfigError, match="1 to 16"):
        DSparkDecoder.from_pretrained("tiny", tmp_path / "draft", block_size=20)


def test_a_draft_without_a_confidence_head_has_no_cut(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", 7)
    draft = write_draft(tmp_path / "draft", 7, confidence=False)
    with pytest.raises(ConfigError, match="confidence head"):
        DSparkDecoder.from_pretrained(target, draft, policy="threshold", confidence_threshold=0.5)
    with DSparkDecoder.from_pretrained(target, draft, policy="fixed") as decoder:
        result = decoder.generate([1], SamplingParams(max_tokens=20, seed=1))
        assert all(r.confidence == () for r in result.rounds) and result.rounds[0].drafted == 4


def test_a_draft_for_another_target_is_refused(tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "draft", 7)
    with pytest.raises(ConfigError, match="vocab_size is 7 in the draft, 512 in the target"):
        DSparkDecoder.from_pretrained("tiny", draft, dtype="float32")


def test_info_says_what_runs(decoders: Decoders) -> None:
    info = decoders().info()
    assert info["device"] == "cpu" and info["dtype"] == "float32" and info["speculation"] == "on"
    assert info["policy"] == "fixed" and info["block_size"] == 7 and info["max_model_len"] == 2048
    assert decoders(draft=None).info()["policy"] == "none: no draft"
    json.dumps(info)


HUGE = 10**400
"""A whole number that no float holds."""
NUMBERS = (
    *("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "seed", "logprobs", "n", "timeout"),
)

BAD_PARAMS: list[dict[str, Any]] = [
    {"temperature": -0.1},
    {"temperature": float("nan")},
    {"temperature": "hot"},
    {"top_p": 0.0},
    {"top_p": 1.1},
    {"top_k": -2},
    {"top_k": 1.5},
    {"min_p": 2},
    {"repetition_penalty": 0.0},
    {"presence_penalty": 3.0},
    {"frequency_penalty": float("inf")},
    {"max_tokens": -1},
    {"max_tokens": True},
    {"min_tokens": 5, "max_tokens": 4},
    {"seed": -1},
    {"seed": 2**64},
    {"stop": [""]},
    {"stop": [3]},
    {"stop_token_ids": ["a"]},
    {"logit_bias": {"a": 1.0}},
    {"logit_bias": {3: float("inf")}},
    {"logit_bias": {2**40: 1.0}},
    {"logit_bias": {1: "a"}},
    {"logit_bias": [1]},
    {"logit_bias": {1: 1e308}},
    {"stop": 5},
    {"stop": "\ud800"},
    {"stop_token_ids": 5},
    {"stop_token_ids": [2**40]},
    {"max_tokens": float("inf")},
    {"max_tokens": 4.0},
    {"top_k": 5.0},
    {"seed": 1.0},
    {"n": 2.0},
    {"ignore_eos": "no"},
    {"speculative": 0},
    {"logprobs": -1},
    {"n": 0},
    {"timeout": -1.0},
    {"timeout": float("nan")},
    {"timeout": Fraction(10**400)},
    {"top_p": Fraction(1, 10**400)},  # 0 as a float
    {"stop": [HUGE]},
    {"stop_token_ids": [HUGE]},
    {"logit_bias": {1: HUGE}},
    {"logit_bias": {1: -HUGE}},
    {"logit_bias": {HUGE: 1.0}},
    {"logit_bias": [10**5000]},
    {"logit_bias": {10**5000: 10**5000}},
    {"ignore_eos": 10**5000},
    *({name: HUGE} for name in NUMBERS),
    *({name: -HUGE} for name in NUMBERS),
    *({name: 10**5000} for name in NUMBERS),
]


@pytest.mark.parametrize("params", BAD_PARAMS, ids=shown)
def test_bad_parameters_are_refused_by_name(params: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(params))) as refused:
        SamplingParams(**params)
    assert len(str(refused.value)) < 300


def test_every_number_is_among_those() -> None:
    numbers = {f.name for f in fields(SamplingParams) if re.search(r"\b(int|float)\b", str(f.type))}
    assert numbers == {*NUMBERS, "logit_bias", "stop_token_ids"}


def test_the_largest_values_reach_the_engine(decoders: Decoders) -> None:
    """What is not refused can be submitted: nothing is left for the engine to stumble over."""
    largest = SamplingParams(
        temperature=10**6,
        top_k=2**31,
        top_p=1,
        min_p=1,
        repetition_penalty=10**9,
        presence_penalty=2,
        frequency_penalty=Fraction(2),
        logit_bias={511: 10**6},
        seed=2**64 - 1,
        stop_token_ids=[511],
        timeout=10**308,
        max_tokens=2,
        logprobs=1000,
    )
    least = SamplingParams(repetition_penalty=1e-9, logit_bias={0: -(10**6)}, top_k=-1, max_tokens=2)
    results = decoders().generate([PROMPT] * 2, [largest, least])
    assert [result.error for result in results] == [None, None]


@pytest.mark.parametrize(
    "name", ["bad_words", "prompt_logprobs", "lora_request", "structured_outputs", "multi_modal_data"]
)
def test_what_others_support_and_we_do_not(name: str) -> None:
    with pytest.raises(RequestError, match=f"{name} is not supported"):
        SamplingParams(**{name: 1})  # type: ignore[arg-type]


def test_token_ids_outside_of_the_vocabulary_are_refused(decoders: Decoders) -> None:
    for name, value in (("logit_bias", {512: 1.0}), ("stop_token_ids", [3, 512])):
        with pytest.raises(RequestError, match=f"{name} names token 512, outside of the ids from 0 to 511"):
            decoders().generate(PROMPT, SamplingParams(**{name: value}))  # type: ignore[arg-type]


def test_defaults() -> None:
    filled = SamplingParams(top_k=5).with_defaults({"temperature": 0.6, "top_k": 20, "top_p": 0.95})
    assert (filled.temperature, filled.top_k, filled.top_p, filled.min_p) == (0.6, 5, 0.95, 0.0)
    assert SamplingParams().with_defaults({"do_sample": False, "temperature": 0.6}).temperature == 0.0
    assert SamplingParams(temperature=0.9).with_defaults({"do_sample": False}).temperature == 0.9
    assert SamplingParams(seed=2**64 - 1).seed == 2**64 - 1
