"""The whole way on the CPU: `DSparkDecoder` through launcher and stand-in driver to kernels, and failures."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cuda_host import Library, compiled_kernels, stand_in
from dspark import DSparkDecoder, GenerationResult, SamplingParams
from dspark.errors import DSparkError
from dspark.kernels import KernelWarning
from places import DATA, RNN_DRAFT

DRAFTS: dict[str, str | Path] = {"draft-vanilla": "tiny-draft", "draft-rnn": RNN_DRAFT}
BLOCK = 7


def golden(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((DATA / "qwen3" / name / "golden" / "trace.json").read_text())
    return rows


def decoder_of(draft: str | Path, threshold: float = 0.5) -> DSparkDecoder:
    return DSparkDecoder.from_pretrained(
        "tiny", draft, device="cpu", policy="threshold", confidence_threshold=threshold
    )


def check_trace(decoder: DSparkDecoder, row: dict[str, Any], threshold: float) -> GenerationResult:
    """The text, and what each round verified and committed, but for the rounds that the limit cuts."""
    (run,) = [run for run in row["runs"] if run["confidence_threshold"] == threshold]
    limit = row["max_new_tokens"]
    result = decoder.generate(row["prompt_ids"], SamplingParams(max_tokens=limit, temperature=0.0))
    assert list(result.token_ids) == run["output_ids"]
    done, compared = 1, 0
    for got, committed, proposed in zip(
        result.rounds, run["acceptance_lengths"], run["proposal_lengths"], strict=False
    ):
        if done + BLOCK + 1 > limit:
            break
        assert (got.committed, got.verified) == (committed, proposed)
        done, compared = done + committed, compared + 1
    assert compared > 10
    return result


@pytest.fixture(scope="module")
def driver() -> Iterator[Library]:
    with stand_in(compiled_kernels()) as made:
        yield made


@pytest.fixture(scope="module")
def decoder(driver: Library) -> Iterator[DSparkDecoder]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = decoder_of("tiny-draft")
    with made:
        yield made


def test_a_golden_trace_and_who_did_what(driver: Library, decoder: DSparkDecoder) -> None:
    found = decoder.info()["kernels"]
    assert found["compiled for"].startswith("sm_90a by NVRTC ") and "stand-in" in found["compiled for"]
    assert all(found[role].startswith("kernel: ") for role in ("attention", "draft attention"))
    assert found["recurrence"] == "this model does not use kernels"
    before = driver.launches("attend_f32_d16")
    check_trace(decoder, golden("draft-vanilla")[0], 0.5)
    assert driver.launches("attend_f32_d16") > before + 100


def test_a_golden_trace_of_the_other_head_and_cut(driver: Library) -> None:
    with decoder_of(RNN_DRAFT, 0.0) as decoder:
        check_trace(decoder, golden("draft-rnn")[1], 0.0)


@pytest.mark.long
@pytest.mark.parametrize("name", DRAFTS)
def test_all_golden_traces(driver: Library, name: str) -> None:
    rows = golden(name)
    for threshold in sorted({run["confidence_threshold"] for run in rows[0]["runs"]}):
        with decoder_of(DRAFTS[name], threshold) as decoder:
            for row in rows:
                check_trace(decoder, row, threshold)


# Those before the ninth are of the prompt, which is tried again (below).
@pytest.mark.parametrize("number", [9, 40])
def test_a_launch_that_fails_in_a_pass_fails_its_request(
    decoder: DSparkDecoder, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A clear error, wherever it strikes; the engine and its caches are sound afterwards."""
    row = golden("draft-vanilla")[1]
    params = SamplingParams(max_tokens=16, temperature=0.0)
    expected = row["runs"][0]["output_ids"][:16]
    monkeypatch.setenv("DSPARK_STANDIN_FAIL", f"cuLaunchKernel:{number}:700")
    with pytest.raises(
        DSparkError, match=r"launching kernel \w+: cuLaunchKernel returned CUDA_ERROR_ILLEGAL_ADDRESS"
    ):
        decoder.generate(row["prompt_ids"], params)
    assert list(decoder.generate(row["prompt_ids"], params).token_ids) == expected


def test_behind_kept_prefixes_a_prompt_is_tried_again(
    decoder: DSparkDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its pass lacked may be the memory that they held."""
    row = golden("draft-vanilla")[1]
    params = SamplingParams(max_tokens=16, temperature=0.0)
    whole = decoder.generate(row["prompt_ids"], params)
    monkeypatch.setenv("DSPARK_STANDIN_FAIL", "cuLaunchKernel:2:700")
    assert decoder.generate(row["prompt_ids"], params).token_ids == whole.token_ids


@pytest.mark.parametrize("function", ["cuModuleLoadData", "cuModuleGetFunction"])
def test_kernels_that_do_not_load_are_one_warning_and_torch(
    driver: Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, function: str
) -> None:
    """The probe's kernel loads, attention's does not: the target says so, the draft's own try has it."""
    (tmp_path / "kernels").symlink_to(compiled_kernels())  # a choice of its own
    monkeypatch.setenv("DSPARK_KERNEL_CACHE", str(tmp_path / "kernels"))
    monkeypatch.setenv("DSPARK_STANDIN_FAIL", f"{function}:2:2")
    with pytest.warns(KernelWarning, match=f"no CUDA kernels for attention.*{function}") as said:
        decoder = decoder_of("tiny-draft")
    with decoder:
        assert len(said) == 1
        found = decoder.info()["kernels"]
        assert found["attention"].startswith("torch: loading ") and function in found["attention"]
        check_trace(decoder, golden("draft-vanilla")[0], 0.5)
