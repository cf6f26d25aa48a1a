"""Whole decoders whose chains and verdicts are the kernels', by way of launcher and stand-in driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import golden_traces
from cuda_host import Library, compiled_kernels, stand_in
from dspark import DSparkDecoder, SamplingParams
from dspark.errors import DSparkError, RequestError
from dspark.kernels.sampler import Sampler
from dspark.serve import models
from places import RNN_DRAFT

PROMPTS = ("Once", "The quick brown", "A")
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {"seed": 3},
    "truncated": {"seed": 4, "top_k": 12, "top_p": 0.9, "min_p": 0.02, "temperature": 0.8},
    "masked": {"seed": 6, "min_tokens": 6, "stop_token_ids": [1, 2, 3], "temperature": 1.2},
    "penalised": {"seed": 5, "repetition_penalty": 1.3, "presence_penalty": 0.4, "logit_bias": {7: 1.0}},
}

Make = Callable[..., DSparkDecoder]


@pytest.fixture(scope="module")
def driver() -> Iterator[Library]:
    with stand_in(compiled_kernels()) as made:
        yield made


def makes(sampling: str) -> Iterator[Make]:
    """Makes decoders of the embedded target on the stand-in's device, where sampling is `sampling`'s."""
    made: dict[str, DSparkDecoder] = {}

    def make(draft: str | Path | None = "tiny-draft", **options: Any) -> DSparkDecoder:
        options = {"policy": "fixed", **options}
        key = repr((str(draft), sorted(options.items())))
        if key not in made:
            made[key] = DSparkDecoder.from_pretrained("tiny", draft, device="cpu", **options)
            assert made[key].info()["kernels"]["sampling"].startswith(sampling), made[key].info()["kernels"]
        return made[key]

    yield make
    for decoder in made.values():
        decoder.close()


@pytest.fixture(scope="module")
def on_kernels(driver: Library) -> Iterator[Make]:
    yield from makes("kernel")


@pytest.fixture(scope="module")
def by_core(driver: Library) -> Iterator[Make]:
    """The same models, attention by the same kernels, but the core decides."""

    def make(*given: Any, **options: Any) -> DSparkDecoder:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(models, "sampling_role", lambda *_, **__: "core: a test says so")
            return cores(*given, **options)

    cores = next(iterator := makes("core"))
    yield make
    next(iterator, None)


def texts(decoder: DSparkDecoder, **sampling: Any) -> list[Any]:
    """What a decoder makes of the prompts: tokens and rounds. One after the other, since products over
    another batch differ in their last bits."""
    params = SamplingParams(max_tokens=8, ignore_eos=True, **sampling)
    results = [decoder.generate(prompt, params) for prompt in PROMPTS]
    return [
        (result.token_ids, [(r.drafted, r.verified, r.accepted, list(r.confidence)) for r in result.rounds])
        for result in results
    ]


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
@pytest.mark.parametrize("name", REQUESTS)
def test_texts_are_the_cores(on_kernels: Make, by_core: Make, name: str, rule: str) -> None:
    found = texts(on_kernels(acceptance=rule), **REQUESTS[name])
    assert found == texts(by_core(acceptance=rule), **REQUESTS[name])
    assert sum(accepted for _, rounds in found for _, _, accepted, _ in rounds) > 0
    assert on_kernels(acceptance=rule).stats()["close_decisions"] == 0


def test_an_rnn_draft_and_a_cut(on_kernels: Make, by_core: Make) -> None:
    options: dict[str, Any] = {"policy": "threshold", "confidence_threshold": 0.3}
    for draft in (RNN_DRAFT, "tiny-draft"):
        found = texts(on_kernels(draft, **options), seed=8)
        assert found == texts(by_core(draft, **options), seed=8)


def test_the_kernels_decide(driver: Library, on_kernels: Make) -> None:
    entries = ("chain_bend", "chain_draw", "chain_confide", "sample_weigh", "sample_decide", "sample_finish")
    before = {entry: driver.launches(entry) for entry in entries}
    texts(on_kernels(), seed=3)
    assert all(driver.launches(entry) > before[entry] for entry in entries)


def test_the_default_policy_times_the_chains_of_the_kernels(
    driver: Library, on_kernels: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a kept table; its texts are those of the others."""
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path))
    before = driver.launches("chain_draw")
    with DSparkDecoder.from_pretrained("tiny", "tiny-draft", device="cpu", max_batch_size=2) as decoder:
        assert driver.launches("chain_draw") > before
        info = decoder.info()
        assert info["policy"] == "throughput" and info["cost_table"].startswith("measured at start in ")
        greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        found = [decoder.generate(prompt, greedy).token_ids for prompt in PROMPTS]
    assert found == [tokens for tokens, _ in texts(on_kernels(), temperature=0.0)]


def test_without_a_draft(on_kernels: Make, by_core: Make) -> None:
    assert texts(on_kernels(None), seed=9) == texts(by_core(None), seed=9)


def test_what_the_kernels_do_not_serve_goes_over_the_host(on_kernels: Make, by_core: Make) -> None:
    """Log-probabilities in the same batch as requests that are the kernels'; the rule "block"; candidates."""
    params = [SamplingParams(max_tokens=8, seed=i, logprobs=2 if i == 1 else None) for i in range(3)]
    found, expected = (make().generate(list(PROMPTS), params) for make in (on_kernels, by_core))
    assert [r.token_ids for r in found] == [r.token_ids for r in expected]
    assert [r.logprobs is None for r in found] == [True, False, True]
    for options in ({"acceptance": "block"}, {"markov_candidates": 16}):
        assert texts(on_kernels(**options), seed=1) == texts(by_core(**options), seed=1)


def test_tensors_of_another_device_are_refused(driver: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their addresses would be read as the kernels' own."""
    monkeypatch.setattr(Sampler, "device", property(lambda _: torch.device("meta"), lambda *_: None), False)
    with pytest.raises(RequestError, match=r"a head of the draft: the kernels run on meta.* is on cpu"):
        DSparkDecoder.from_pretrained("tiny", "tiny-draft", device="cpu", policy="fixed")
    with (
        DSparkDecoder.from_pretrained("tiny", None, device="cpu") as decoder,
        pytest.raises(DSparkError, match=r"target logits: the kernels run on meta.* is on cpu"),
    ):
        decoder.generate("Once", SamplingParams(max_tokens=2))


def traces() -> list[Any]:
    """The reference's traces; one of each draft in every run, the others in the long one."""
    rows = golden_traces.rows()
    short = {f"{name}-0-0.5" for name in golden_traces.DRAFTS}
    return [
        row if row.id in short else pytest.param(*row.values, id=row.id, marks=pytest.mark.long)
        for row in rows
    ]


@pytest.mark.parametrize(("name", "row", "run"), traces())
def test_golden_traces(on_kernels: Make, name: str, row: dict[str, Any], run: dict[str, Any]) -> None:
    golden_traces.check_trace(on_kernels, name, row, run)
