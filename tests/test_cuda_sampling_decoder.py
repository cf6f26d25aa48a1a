"""Whole decoders whose chains and verdicts are the kernels', by way of launcher and stand-in driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import test_traces
from conftest import RNN_DRAFT
from cuda_host import library, needs_compiler
from dspark import DSparkDecoder, SamplingParams

PROMPTS = ("Once", "The quick brown", "A")
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {"seed": 3},
    "truncated": {"seed": 4, "top_k": 12, "top_p": 0.9, "min_p": 0.02, "temperature": 0.8},
    "masked": {"seed": 6, "min_tokens": 9, "stop_token_ids": [1, 2, 3], "temperature": 1.2},
    "penalised": {"seed": 5, "repetition_penalty": 1.3, "presence_penalty": 0.4, "logit_bias": {7: 1.0}},
}

Make = Callable[..., DSparkDecoder]


@pytest.fixture(scope="module")
def on_kernels() -> Iterator[Make]:
    """Makes decoders of the embedded target on the stand-in's device."""
    needs_compiler()
    patch = pytest.MonkeyPatch()
    patch.setenv("DSPARK_CUDA_DRIVER", str(library().path))
    made: dict[str, DSparkDecoder] = {}

    def make(draft: str | Path | None = "tiny-draft", **options: Any) -> DSparkDecoder:
        options = {"policy": "fixed", **options}
        key = repr((str(draft), sorted(options.items())))
        if key not in made:
            made[key] = DSparkDecoder.from_pretrained("tiny", draft, device="cpu", **options)
            assert made[key].info()["kernels"]["sampling"].startswith("kernel"), made[key].info()["kernels"]
        return made[key]

    yield make
    for decoder in made.values():
        decoder.close()
    patch.undo()


def texts(decoder: DSparkDecoder, **sampling: Any) -> list[Any]:
    """What a decoder makes of the prompts, as one batch: tokens and rounds."""
    results = decoder.generate(list(PROMPTS), SamplingParams(max_tokens=8, ignore_eos=True, **sampling))
    return [
        (result.token_ids, [(r.drafted, r.verified, r.accepted, list(r.confidence)) for r in result.rounds])
        for result in results
    ]


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
@pytest.mark.parametrize("name", REQUESTS)
def test_texts_are_the_cores(on_kernels: Make, decoders: Make, name: str, rule: str) -> None:
    found = texts(on_kernels(acceptance=rule), **REQUESTS[name])
    assert found == texts(decoders(acceptance=rule), **REQUESTS[name])
    assert sum(accepted for _, rounds in found for _, _, accepted, _ in rounds) > 0
    assert on_kernels(acceptance=rule).stats()["close_decisions"] == 0


def test_an_rnn_draft_and_a_cut(on_kernels: Make, decoders: Make) -> None:
    options: dict[str, Any] = {"policy": "threshold", "confidence_threshold": 0.3}
    for draft in (RNN_DRAFT, "tiny-draft"):
        found = texts(on_kernels(draft, **options), seed=8)
        assert found == texts(decoders(draft, **options), seed=8)


def test_the_kernels_are_what_decides(decoders: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault planted in them shows in the text."""
    planted = library("-DPLANTED_FAULTS")
    monkeypatch.setenv("DSPARK_CUDA_DRIVER", str(planted.path))
    with DSparkDecoder.from_pretrained("tiny", "tiny-draft", device="cpu", policy="fixed") as decoder:
        expected = texts(decoders(), seed=3)
        assert texts(decoder, seed=3) == expected
        try:
            planted._library.plant(5)  # the target's argmax
            assert texts(decoder, seed=3) != expected
        finally:
            planted._library.plant(0)


def test_without_a_draft(on_kernels: Make, decoders: Make) -> None:
    assert texts(on_kernels(None), seed=9) == texts(decoders(None), seed=9)


def test_what_the_kernels_do_not_serve_goes_over_the_host(on_kernels: Make, decoders: Make) -> None:
    """Log-probabilities in the same batch as requests that are the kernels'; the rule "block"; candidates."""
    params = [SamplingParams(max_tokens=8, seed=i, logprobs=2 if i == 1 else None) for i in range(3)]
    found, expected = (make().generate(list(PROMPTS), params) for make in (on_kernels, decoders))
    assert [(r.token_ids, r.logprobs) for r in found] == [(r.token_ids, r.logprobs) for r in expected]
    for options in ({"acceptance": "block"}, {"markov_candidates": 16}):
        assert texts(on_kernels(**options), seed=1) == texts(decoders(**options), seed=1)


def traces() -> list[Any]:
    """The reference's traces; one of each draft in every run, the others in the long one."""
    rows = test_traces.rows()
    short = {f"{name}-0-0.5" for name in test_traces.DRAFTS}
    return [
        row if row.id in short else pytest.param(*row.values, id=row.id, marks=pytest.mark.long)
        for row in rows
    ]


@pytest.mark.parametrize(("name", "row", "run"), traces())
def test_golden_traces(on_kernels: Make, name: str, row: dict[str, Any], run: dict[str, Any]) -> None:
    test_traces.test_trace(on_kernels, name, row, run)
