"""`generate`: shapes of the answer, parameters, limits and errors."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from commandline import link_target
from dspark import (
    CapacityError,
    DSparkDecoder,
    NumericsError,
    RequestError,
    SamplingParams,
    Timing,
)
from dspark.pretrained import resolve

PROMPT = "def read(self, size):\n"
Decoders = Callable[..., DSparkDecoder]


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 40, **changes})


def test_one_in_one_out_a_list_in_a_list_out(decoders: Decoders) -> None:
    decoder = decoders()
    one = decoder.generate(PROMPT, greedy())
    ids = list(one.prompt_token_ids)
    assert one.text and len(one.token_ids) == 40 and one.finish_reason == "length"
    assert decoder.generate(ids, greedy()).token_ids == one.token_ids
    assert decoder.generate(tuple(ids), greedy()).token_ids == one.token_ids
    assert decoder.generate(np.array(ids), greedy()).token_ids == one.token_ids
    several = decoder.generate([np.array(ids), torch.tensor(ids)], greedy())
    assert [r.token_ids for r in several] == [one.token_ids] * 2
    assert [r.token_ids for r in decoder.generate([PROMPT, ids], greedy())] == [one.token_ids] * 2
    assert decoder.generate([], greedy()) == []


def test_n_gives_a_list_per_prompt(decoders: Decoders) -> None:
    decoder = decoders()
    params = SamplingParams(max_tokens=20, n=3, seed=4, temperature=1.0)
    samples: Any = decoder.generate(PROMPT, params)
    assert len(samples) == 3 and len({s.token_ids for s in samples}) == 3
    assert [s.sample for s in samples] == [0, 1, 2] and len({s.seed for s in samples}) == 1
    nested: Any = decoder.generate([PROMPT, "x = "], [params, greedy()])
    assert [s.token_ids for s in nested[0]] == [s.token_ids for s in samples]
    assert nested[1].token_ids == decoder.generate("x = ", greedy()).token_ids


def test_params_may_be_one_for_each_prompt(decoders: Decoders) -> None:
    results = decoders().generate([PROMPT, PROMPT], [greedy(max_tokens=3), greedy(max_tokens=5)])
    assert [len(r.token_ids) for r in results] == [3, 5]
    with pytest.raises(RequestError, match="1 entries for 2 prompts"):
        decoders().generate([PROMPT, PROMPT], [greedy()])


@pytest.mark.parametrize(
    "prompt", ["", [], [512], [-1], [True], 7, None, b"abc", bytearray(b"a"), ["a", 3.5][1:]]
)
def test_a_bad_prompt_alone_raises(decoders: Decoders, prompt: Any) -> None:
    if prompt == []:
        assert decoders().generate(prompt) == []  # an empty list is a list of no prompts
        return
    if isinstance(prompt, list) and isinstance(prompt[0], float):
        [result] = decoders().generate(prompt)
        assert result.finish_reason == "error"
        return
    with pytest.raises(RequestError):
        decoders().generate(prompt)


@pytest.mark.parametrize("params", [{"max_tokens": 4}, 5, [{"temperature": 0.0}]])
def test_params_of_another_type_are_refused(decoders: Decoders, params: Any) -> None:
    for call in (decoders().generate, decoders().stream):
        with pytest.raises(RequestError, match="params must be a SamplingParams"):
            call(PROMPT, params)
    with pytest.raises(RequestError, match="params must be a SamplingParams"):
        decoders().generate([PROMPT], params)


def test_in_a_list_a_bad_prompt_hurts_nobody_else(decoders: Decoders) -> None:
    decoder = decoders()
    good, bad, also = decoder.generate([PROMPT, [1, 9999], PROMPT], greedy())
    assert good.token_ids == also.token_ids and good.finish_reason == "length"
    assert bad.finish_reason == "error" and isinstance(bad.error, RequestError)
    assert "9999" in str(bad.error) and bad.token_ids == ()


@pytest.mark.parametrize("max_tokens", [0, 1, 2, 3])
def test_max_tokens_is_exact(decoders: Decoders, max_tokens: int) -> None:
    whole = decoders().generate(PROMPT, greedy())
    result = decoders().generate(PROMPT, greedy(max_tokens=max_tokens))
    assert result.token_ids == whole.token_ids[:max_tokens]
    assert result.finish_reason == "length"
    if max_tokens < 2:
        assert result.rounds == () and result.acceptance_length is None


@pytest.mark.parametrize("options", [{}, {"draft": None}], ids=["draft", "plain"])
@pytest.mark.parametrize("room", [0, 1, 2, 7, 9])
def test_the_window_is_never_overrun(decoders: Decoders, options: dict[str, Any], room: int) -> None:
    decoder = decoders(**options, max_model_len=48)
    prompt = [200 + i % 50 for i in range(48 - room)]
    result = decoder.generate(prompt, SamplingParams(temperature=0.0, ignore_eos=True))
    assert len(result.token_ids) == room and result.finish_reason == "length"
    with pytest.raises(CapacityError, match="49 tokens, but the context window holds 48"):
        decoder.generate([200] * 49)


def test_a_long_prompt_to_the_models_own_window(decoders: Decoders) -> None:
    prompt = [200 + i % 300 for i in range(2044)]
    texts = [
        decoders(**o).generate(prompt, SamplingParams(temperature=0.0)).token_ids
        for o in ({}, {"draft": None})
    ]
    assert texts[0] == texts[1] and len(texts[0]) == 4


def test_stop_ids_and_strings(decoders: Decoders) -> None:
    decoder = decoders()
    whole = decoder.generate(PROMPT, greedy())
    for cut in (1, 7, 20):
        token = whole.token_ids[cut]
        first = whole.token_ids.index(token)
        result = decoder.generate(PROMPT, greedy(stop_token_ids=[token]))
        assert result.token_ids == whole.token_ids[: first + 1]
        assert (result.finish_reason, result.stop_reason) == ("stop", token)
    for start in range(3, 30, 4):
        string = whole.text[start : start + 6]
        result = decoder.generate(PROMPT, greedy(stop=["never there", string]))
        assert result.text == whole.text[: whole.text.index(string)]
        assert (result.finish_reason, result.stop_reason) == ("stop", string)
        kept = decoder.generate(PROMPT, greedy(stop=string, include_stop_str_in_output=True))
        assert kept.text == whole.text[: whole.text.index(string) + len(string)]
        assert kept.token_ids == result.token_ids == whole.token_ids[: len(result.token_ids)]


def test_the_end_token_has_no_reason_and_can_be_ignored(decoders: Decoders) -> None:
    params = greedy(logit_bias={0: 100.0}, min_tokens=3, max_tokens=9)
    result = decoders().generate(PROMPT, params)
    assert len(result.token_ids) == 4 and result.token_ids[-1] == 0
    assert (result.finish_reason, result.stop_reason) == ("stop", None)
    ignored = decoders().generate(PROMPT, greedy(logit_bias={0: 100.0}, ignore_eos=True, max_tokens=9))
    assert ignored.token_ids == (0,) * 9 and ignored.text == ""


@pytest.mark.parametrize(
    "sampling",
    [
        {"repetition_penalty": 1.5},
        {"presence_penalty": 1.0, "frequency_penalty": 0.7},
        {"logit_bias": {90: -9.0, 354: -9.0}},
        {"min_tokens": 30, "stop_token_ids": [222]},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "logit_bias": {10: 1.0}},
    ],
)
def test_greedy_transforms_equal_decoding_without_a_draft(
    decoders: Decoders, sampling: dict[str, Any]
) -> None:
    """Repetitive text: tokens drafted earlier in a block count for its later rows."""
    repetitive = [49, 90, 354, 267, 222] * 6
    plain = decoders(draft=None).generate(repetitive, greedy(max_tokens=80, **sampling))
    drafted = decoders().generate(repetitive, greedy(max_tokens=80, **sampling))
    assert drafted.token_ids == plain.token_ids and drafted.finish_reason == plain.finish_reason
    assert sum(r.accepted for r in drafted.rounds) > 0
    untouched = decoders().generate(repetitive, greedy(max_tokens=80))
    assert untouched.token_ids != drafted.token_ids, "the parameter changes the text"


@pytest.mark.parametrize("truncation", [{"top_k": 1}, {"top_p": 0.0001}, {"min_p": 1.0}])
@pytest.mark.parametrize("acceptance", ["rejection", "block", "coupled"])
def test_truncation_to_one_token_is_greedy(
    decoders: Decoders, acceptance: str, truncation: dict[str, Any]
) -> None:
    decoder = decoders(acceptance=acceptance)
    expected = decoder.generate(PROMPT, greedy())
    result = decoder.generate(PROMPT, SamplingParams(temperature=1.0, max_tokens=40, **truncation))
    assert result.token_ids == expected.token_ids


@pytest.mark.parametrize("acceptance", ["rejection", "block", "coupled"])
def test_a_seed_gives_its_text_alone_and_in_a_batch(decoders: Decoders, acceptance: str) -> None:
    decoder = decoders(acceptance=acceptance, dtype="float64")
    params = SamplingParams(temperature=1.0, max_tokens=48, seed=11)
    alone = [decoder.generate(PROMPT, params).token_ids for _ in range(2)]
    batch = decoder.generate(["import os\n", PROMPT, "x"], params)
    assert alone[0] == alone[1] == batch[1].token_ids
    fresh = decoder.generate(PROMPT, SamplingParams(temperature=1.0, max_tokens=48))
    again = decoder.generate(PROMPT, SamplingParams(temperature=1.0, max_tokens=48, seed=fresh.seed))
    assert fresh.token_ids == again.token_ids != alone[0]


def test_logprobs_are_the_targets(decoders: Decoders) -> None:
    for params in (greedy(logprobs=3), greedy(temperature=1.0, logprobs=3, seed=3, top_k=40)):
        drafted = decoders(acceptance="coupled").generate(PROMPT, params)
        plain = decoders(draft=None, acceptance="coupled").generate(PROMPT, params)
        assert (
            drafted.token_ids == plain.token_ids
            and drafted.logprobs is not None
            and plain.logprobs is not None
        )
        assert len(drafted.logprobs) == 40
        for token, row, expected in zip(drafted.token_ids, drafted.logprobs, plain.logprobs, strict=True):
            assert set(row) == set(expected) and token in row and 3 <= len(row) <= 4
            assert all(abs(row[t] - expected[t]) < 1e-3 for t in row)
            assert sum(np.exp(list(row.values()))) <= 1 + 1e-6
    assert decoders().generate(PROMPT, greedy()).logprobs is None


@pytest.mark.parametrize("acceptance", ["rejection", "block", "coupled"])
def test_logprobs_of_every_kind_of_token_are_the_target_s(decoders: Decoders, acceptance: str) -> None:
    """Accepted, corrected and bonus tokens: against a pass over the whole text."""
    decoder = decoders(acceptance=acceptance, dtype="float64")
    params = SamplingParams(max_tokens=160, temperature=0.7, top_k=50, seed=4, logprobs=2, ignore_eos=True)
    result = decoder.generate(PROMPT, params)
    assert result.speculation == "on" and result.logprobs is not None
    kinds = {"accepted" if r.accepted else "none accepted" for r in result.rounds}
    kinds |= {"bonus" if r.accepted == r.verified > 0 else "corrected" for r in result.rounds}
    assert kinds >= {"accepted", "bonus", "corrected"}
    target, prompt = decoder.models.target, list(result.prompt_token_ids)
    ids = torch.tensor(prompt + list(result.token_ids[:-1]))
    with torch.inference_mode():
        logits, _ = target(ids, [(target.new_cache(), len(ids))])
    rows = logits[len(prompt) - 1 :] / 0.7
    rows = rows.masked_fill(rows < rows.topk(50).values[:, -1:], float("-inf")).log_softmax(-1)
    for token, row, found in zip(result.token_ids, rows, result.logprobs, strict=True):
        assert token in found
        assert all(abs(value - float(row[other])) < 1e-9 for other, value in found.items())


def test_results_of_numpys_numbers_are_plain(decoders: Decoders) -> None:
    params = SamplingParams(
        temperature=np.float64(0.7),
        seed=np.int64(5),  # type: ignore[arg-type]
        n=np.int64(2),  # type: ignore[arg-type]
        max_tokens=np.int64(9),  # type: ignore[arg-type]
        top_k=np.int64(40),  # type: ignore[arg-type]
        logprobs=np.int64(1),  # type: ignore[arg-type]
        logit_bias={np.int64(222): np.float64(100.0)},  # type: ignore[dict-item]
        stop_token_ids=[np.int64(222)],  # type: ignore[list-item]
        timeout=np.float64(60.0),
    )
    samples: Any = decoders().generate(np.array(decoders().models.tokens(PROMPT)), params)
    assert [sample.stop_reason for sample in samples] == [222, 222]
    json.dumps([sample.to_json() for sample in samples])
    assert type(samples[1].seed) is type(samples[1].sample) is int


def test_blocks_shorter_than_the_checkpoints_are_prefixes(decoders: Decoders) -> None:
    whole = decoders().generate(PROMPT, greedy())
    for block_size in (1, 3):
        result = decoders(block_size=block_size).generate(PROMPT, greedy())
        assert result.token_ids == whole.token_ids
        assert max(r.drafted for r in result.rounds) == block_size
        assert result.rounds[0].confidence == pytest.approx(whole.rounds[0].confidence[:block_size], abs=1e-5)


def test_markov_candidates_keep_the_text(decoders: Decoders) -> None:
    whole = decoders().generate(PROMPT, greedy())
    few = decoders(markov_candidates=16).generate(PROMPT, greedy())
    assert few.token_ids == whole.token_ids and sum(r.accepted for r in few.rounds) > 0


def test_a_timeout_aborts(decoders: Decoders) -> None:
    result = decoders().generate(PROMPT, SamplingParams(timeout=0.05, ignore_eos=True))
    assert result.finish_reason == "abort" and result.timing.total_s < 2


def test_a_long_prompt_stops_neither_a_deadline_nor_the_others(decoders: Decoders) -> None:
    """Prompts run in chunks: a batch that times out never reaches its rounds, and streams go on between."""
    decoder = decoders(prefill_chunk_size=16)
    stream = decoder.stream(PROMPT, SamplingParams(temperature=0.0, ignore_eos=True))
    next(stream)
    late = decoder.generate([[3] * 2000] * 16, SamplingParams(max_tokens=3, ignore_eos=True, timeout=0.05))
    assert {(r.finish_reason, r.token_ids) for r in late} == {("abort", ())}
    assert all(r.timing.total_s < 1.0 for r in late)
    assert next(stream).token_ids
    stream.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("chunk", [1, 3, 512])
def test_a_prompt_in_chunks_gives_the_same_drafts(decoders: Decoders, chunk: int) -> None:
    whole = decoders(dtype="float64").generate(PROMPT, greedy())
    parts = decoders(dtype="float64", prefill_chunk_size=chunk).generate([PROMPT, "x"], greedy())[0]
    assert parts.token_ids == whole.token_ids
    assert [(r.drafted, r.accepted) for r in parts.rounds] == [(r.drafted, r.accepted) for r in whole.rounds]


def test_a_request_of_the_whole_cache_fits(decoders: Decoders) -> None:
    decoder = decoders(max_model_len=48, max_kv_tokens=48)
    assert len(decoder.generate([7] * 10, SamplingParams(ignore_eos=True)).token_ids) == 38


def test_what_is_not_given_comes_from_the_generation_config(tmp_path: Path) -> None:
    shutil.copytree(resolve("tiny", "target"), tmp_path / "target")
    path = tmp_path / "target" / "generation_config.json"
    path.write_text(json.dumps({"do_sample": False, "eos_token_id": [0, 222]}))
    with DSparkDecoder.from_pretrained(tmp_path / "target", "tiny-draft", policy="fixed") as decoder:
        texts = {decoder.generate(PROMPT, SamplingParams(max_tokens=30)).token_ids for _ in range(3)}
        assert len(texts) == 1 and next(iter(texts))[-1] == 222, "greedy, and ends at the second end token"
    path.write_text(json.dumps({"temperature": 0.7, "top_k": 1, "do_sample": True}))
    with DSparkDecoder.from_pretrained(tmp_path / "target", "tiny-draft", policy="fixed") as decoder:
        assert len({decoder.generate(PROMPT, SamplingParams(max_tokens=30)).token_ids for _ in range(3)}) == 1


def test_chat_without_a_template_is_refused(decoders: Decoders) -> None:
    with pytest.raises(RequestError, match="chat template"):
        decoders().chat([{"role": "user", "content": "hello"}])


def test_a_chat_of_which_the_template_makes_nothing_is_refused(tmp_path: Path) -> None:
    """And is no list of no prompts."""
    link_target(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    )
    with DSparkDecoder.from_pretrained(tmp_path, device="cpu") as decoder:
        with pytest.raises(RequestError, match="the prompt is empty"):
            decoder.chat([{"role": "system", "content": "be brief"}])
        assert len(decoder.chat([{"role": "user", "content": PROMPT}], greedy()).token_ids) == 40


def test_a_target_without_tokenizer_answers_token_ids(tmp_path: Path) -> None:
    shutil.copytree(resolve("tiny", "target"), tmp_path / "target")
    (tmp_path / "target" / "tokenizer.json").unlink()
    with DSparkDecoder.from_pretrained(tmp_path / "target", "tiny-draft", policy="fixed") as decoder:
        result = decoder.generate([456, 290], greedy())
        assert len(result.token_ids) == 40 and result.text == ""
        assert "tokenizer.json" in decoder.info()["switched_off"][0]
        for bad in (lambda: decoder.generate("text"), lambda: decoder.generate([456], greedy(stop="x"))):
            with pytest.raises(RequestError, match="token"):
                bad()


def test_useless_target_weights_fail_the_request_by_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(resolve("tiny", "target"), tmp_path / "target")
    weights = load_file(tmp_path / "target" / "model.safetensors")
    weights["model.embed_tokens.weight"][300] = torch.nan
    save_file(weights, tmp_path / "target" / "model.safetensors")
    with DSparkDecoder.from_pretrained(tmp_path / "target", "tiny-draft", policy="fixed") as decoder:
        with pytest.raises(NumericsError, match="NaN"):
            decoder.generate([300], greedy())
        bad, good = decoder.generate([[300], [456, 290]], greedy(logit_bias={300: -100.0}))
        assert bad.finish_reason == "error" and isinstance(bad.error, NumericsError)
        assert len(good.token_ids) == 40


def test_ctrl_c_cancels_and_the_decoder_lives_on(decoders: Decoders) -> None:
    decoder = decoders()
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        decoder.generate([PROMPT] * 4, SamplingParams(ignore_eos=True))
    while decoder.stats()["running"]:
        time.sleep(0.01)
    assert decoder.generate(PROMPT, greedy()).finish_reason == "length"


def test_close_aborts_what_runs_and_refuses_what_comes() -> None:
    decoder = DSparkDecoder.from_pretrained("tiny", "tiny-draft", policy="fixed")
    results: list[Any] = []
    worker = threading.Thread(
        target=lambda: results.append(decoder.generate(PROMPT, SamplingParams(ignore_eos=True)))
    )
    worker.start()
    while decoder.stats()["running"] == 0:
        pass
    decoder.close()
    worker.join(10)
    assert results[0].finish_reason == "abort"
    decoder.close()
    with pytest.raises(CapacityError, match="closed"):
        decoder.generate(PROMPT)


def test_threads_share_one_engine(decoders: Decoders) -> None:
    decoder = decoders()
    prompts = ["import os\n", PROMPT, "class A:\n    ", "x = [", "for i in "]
    expected = [decoder.generate(p, greedy()).token_ids for p in prompts]
    found: dict[int, Any] = {}

    def work(i: int) -> None:
        found[i] = decoder.generate(prompts[i % 5], greedy()).token_ids

    workers = [threading.Thread(target=work, args=(i,)) for i in range(20)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(found[i] == expected[i % 5] for i in range(20))


@pytest.mark.parametrize(
    ("percentile", "place"), [(0, 1), (10, 1), (11, 2), (50, 5), (51, 6), (90, 9), (99, 10), (100, 10)]
)
def test_percentiles_are_of_the_nearest_rank(percentile: float, place: int) -> None:
    gaps = tuple(float(place) for place in (3, 1, 2, 10, 9, 8, 4, 5, 6, 7))
    assert Timing(0, 0, 0, 0, 0, 0, None, gaps).inter_token_s(percentile) == place
    assert Timing(0, 0, 0, 0, 0, 0, None, ()).inter_token_s(percentile) is None
    assert Timing(0, 0, 0, 0, 0, 0, None, gaps * 10).inter_token_s(7) == 1.0, "7 of 100, not 8"


def test_timing_and_stats_add_up(decoders: Decoders) -> None:
    decoder = decoders()
    before = decoder.stats()
    result = decoder.generate(PROMPT, greedy())
    after, timing = decoder.stats(), result.timing
    assert after["tokens"] - before["tokens"] == 40
    assert after["accepted"] - before["accepted"] == sum(r.accepted for r in result.rounds)
    assert after["finished"] - before["finished"] == 1
    assert timing.time_to_first_token_s is not None and 0 < timing.time_to_first_token_s < timing.total_s
    assert len(timing.gaps_s) == 39
    assert sum(timing.gaps_s) == pytest.approx(timing.total_s - timing.time_to_first_token_s, rel=0.2)
    parts = timing.prefill_s + timing.draft_s + timing.verify_s + timing.sample_s
    assert 0 < parts <= timing.total_s
    p50, p99 = timing.inter_token_s(50), timing.inter_token_s(99)
    assert p50 is not None and p99 is not None and 0 < p50 <= p99
