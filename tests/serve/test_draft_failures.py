"""A draft that raises costs no request anything but its help."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from commandline import run
from dspark import DSparkDecoder, SamplingParams
from dspark.bench.cells import Cell
from dspark.bench.run import Bench, ModeRuns
from dspark.calibrate.rollout import Plan
from dspark.draft import DraftContext, DSparkDraftModel
from dspark.errors import DSparkError
from dspark.evaluate.run import Evaluator, WithoutMarkov
from dspark.serve.models import Models
from dspark.serve.options import Options
from dspark.serve.runner import Runner

SHORT = [7, 8, 9]
LONG = [i * 7919 % 500 for i in range(300)]
"""More than may wait for the draft's context."""
GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
ALWAYS = range(10**6)

Decoders = Callable[..., DSparkDecoder]


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    with DSparkDecoder.from_pretrained("tiny", dtype="float64", device="cpu") as plain:
        return [plain.generate(prompt, GREEDY).token_ids for prompt in (SHORT, LONG)]


def break_down(monkeypatch: pytest.MonkeyPatch, method: str, calls: Collection[int]) -> None:
    """Lets these calls of a method of the draft, or of its contexts, fail."""
    broken = DraftContext if method == "reserve" else DSparkDraftModel
    whole, count = getattr(broken, method), iter(ALWAYS)

    def failing(*args: Any) -> Any:
        if next(count) in calls:
            raise RuntimeError("out of memory")
        return whole(*args)

    monkeypatch.setattr(broken, method, failing)


@pytest.mark.parametrize(
    "options", [{"policy": "fixed"}, {"policy": "threshold", "confidence_threshold": 0.1}]
)
@pytest.mark.parametrize("method", ["block", "extend", "reserve"])
def test_a_draft_that_fails_steps_aside(
    monkeypatch: pytest.MonkeyPatch, expected: list[Any], method: str, options: dict[str, Any]
) -> None:
    with (
        DSparkDecoder.from_pretrained(
            "tiny", "tiny-draft", dtype="float64", device="cpu", **options
        ) as decoder,
        monkeypatch.context() as patch,
    ):
        break_down(patch, method, ALWAYS)
        results = decoder.generate([SHORT, LONG], GREEDY)
        assert [r.token_ids for r in results] == expected
        for result in results:
            assert result.error is None and all(round_.drafted == 0 for round_ in result.rounds)
            rounds = len(result.rounds)  # in the last one there is no room for a draft
            why = f"{rounds - 1} of {rounds} rounds without a draft: the draft failed ({rounds - 1})"
            assert result.speculation == f"on; {why}"
        # Without room a context cannot be copied; rows that wait can.
        again = decoder.generate(LONG, GREEDY)
        assert again.token_ids == expected[1] and (again.reused_tokens == 0) == (method == "reserve")
        stats = decoder.stats()
        assert 0 < stats["draft_failures"] < 8 and "out of memory" in stats["draft_failure"]
        assert stats["skipped_broken"] == stats["rounds"] - 3 and stats["drafted"] == 0
        patch.undo()
        recovered = decoder.generate(SHORT, SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True))
        assert recovered.token_ids[:40] == expected[0]
        assert decoder.stats()["draft_failures"] == stats["draft_failures"]
        assert any(round_.drafted for round_ in recovered.rounds)


@pytest.mark.parametrize("call", range(1, 5))
def test_what_a_commit_cannot_feed_waits_for_the_next_draft(
    monkeypatch: pytest.MonkeyPatch,
    expected: list[Any],
    caplog: pytest.LogCaptureFixture,
    call: int,
) -> None:
    with DSparkDecoder.from_pretrained(
        "tiny", "tiny-draft", dtype="float64", device="cpu", policy="fixed"
    ) as decoder:
        whole = decoder.generate(SHORT, GREEDY)
        break_down(monkeypatch, "extend", [call])
        with caplog.at_level(logging.ERROR, "dspark"):
            result = decoder.generate([*SHORT], GREEDY)
        assert "the rows wait for the next draft" in caplog.text
        assert result.token_ids == whole.token_ids == expected[0]
        assert [r.to_json() for r in result.rounds] == [r.to_json() for r in whole.rounds]
        assert decoder.stats()["draft_failures"] == 0


@pytest.mark.parametrize("packs", [False, True])
def test_a_prefill_that_fails_keeps_nothing(monkeypatch: pytest.MonkeyPatch, packs: bool) -> None:
    models = Models.load("tiny", "tiny-draft", device="cpu", dtype="float64")
    parts = [SHORT, [1, 2], [3, 4, 5]]
    whole = Runner._prefill

    def failing(runner: Runner, prompts: Sequence[tuple[int, list[int]]]) -> Any:
        if any(request == 3 for request, _ in prompts):
            raise RuntimeError("out of memory")
        return whole(runner, prompts)

    with torch.inference_mode():
        runner, clean = models.runner(), models.runner()
        logits = clean.prefill([1, 2, 3], parts, [True] * 3)
        with monkeypatch.context() as patch:
            patch.setattr(Runner, "_prefill", failing)
            runner.packs_prompts = packs
            with pytest.raises(RuntimeError, match="out of memory"):
                runner.prefill([1, 2, 3], parts, [True] * 3)
        assert [cache.length for cache in runner._caches.values()] == [0, 0, 0]
        runner.packs_prompts = False
        alone = [runner.prefill([i + 1], [part], [True]) for i, part in enumerate(parts)]
        assert torch.equal(torch.cat(alone), logits)
        blocks = [each.draft([1, 2, 3], [4, 4, 4])[0] for each in (runner, clean)]
        assert torch.equal(*blocks)


def test_the_command_line_says_it_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    break_down(monkeypatch, "block", ALWAYS)
    how = "--temperature", "0", "--max-tokens", "8", "--device", "cpu", "--policy", "fixed"
    arguments = "generate", "--token-ids", "7,8,9", *how
    code, out, err = run(*arguments)
    assert code == 0 and out
    lines = err.splitlines()
    assert any("out of memory" in line for line in lines) and "Traceback" not in err
    assert all(line.startswith("dspark: ") for line in lines if "out of memory" in line)
    monkeypatch.setenv("DSPARK_TRACEBACK", "1")
    assert run(*arguments)[1] == out


@pytest.mark.parametrize("call", [0, 5])
@pytest.mark.parametrize("command", ["evaluate", "calibrate"])
def test_nothing_is_measured_with_a_draft_that_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, call: int
) -> None:
    prompts, output = tmp_path / "some.jsonl", tmp_path / "calibration.json"
    prompts.write_text("".join(f'{{"prompt": "import {name}\\n"}}\n' for name in ("os", "re", "sys", "json")))
    written = ("--output", output) if command == "calibrate" else ()
    break_down(monkeypatch, "block", [call])
    how = ("--prompts", prompts, "--tokens", "32", "--temperature", "0", "--device", "cpu")
    code, out, err = run(command, *how, *written)
    assert (code, out) == (2, "") and not output.exists()
    assert "DSparkError: the draft failed" in err and "out of memory" in err


@pytest.mark.parametrize("call", [0, 5])
def test_nothing_is_audited_with_a_draft_that_fails(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    break_down(monkeypatch, "block", [call])
    code, out, err = run("audit", "--tokens", 16, "--samples", 2, "--device", "cpu")
    assert (code, out) == (2, "") and "DSparkError: the draft failed" in err and "out of memory" in err


def test_a_benchmark_ends_where_the_draft_fails_and_keeps_what_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = Bench._cell

    def cell(bench: Bench, of: Cell) -> dict[str, ModeRuns]:
        if of.batch == 2:
            break_down(monkeypatch, "block", [3])
        return whole(bench, of)

    monkeypatch.setattr(Bench, "_cell", cell)
    small = ("--batches", 1, 2, "--temperatures", 0, "--policies", "fixed", "--turns", 1, "--tokens", 8)
    code, out, err = run("bench", "--target", "tiny", "--device", "cpu", *small, "--json")
    said = json.loads(out)
    assert code == 2 and [one["batch"] for one in said["cells"]] == [1]
    assert "the draft failed" in said["error"]["message"] and "out of memory" in err


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("out of memory")])
def test_an_evaluation_that_ends_early_keeps_what_it_has(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, tmp_path: Path
) -> None:
    whole = Evaluator._in_turns
    calls = count()

    def in_turns(*args: Any) -> Any:
        if next(calls) == 1:
            raise error
        return whole(*args)

    monkeypatch.setattr(Evaluator, "_in_turns", in_turns)
    prompts, page = tmp_path / "one.jsonl", tmp_path / "page.html"
    prompts.write_text('{"prompt": "import os\\n"}\n')
    small = ("--target", "tiny", "--device", "cpu", "--prompts", prompts, "--tokens", 8, "--html", page)
    code, out, err = run("evaluate", *small, "--json")
    said = json.loads(out)
    assert [one["temperature"] for one in said["regimes"]] == [0.0]
    assert said["error"]["type"] == type(error).__name__
    assert f"missing ({type(error).__name__}: " in page.read_text() and "temperature 0" in page.read_text()
    assert code == 130 if isinstance(error, KeyboardInterrupt) else code == 2 and "out of memory" in err


def test_a_block_drafter_that_fails_is_no_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    models = Models.load("tiny", "tiny-draft", device="cpu", dtype="float32")
    whole = WithoutMarkov.heads

    def failing(bare: WithoutMarkov) -> Any:
        break_down(monkeypatch, "block", ALWAYS)
        return whole(bare)

    monkeypatch.setattr(WithoutMarkov, "heads", failing)
    texts, regimes = {"one": ["import os\n"]}, [SamplingParams(temperature=0.0)]
    one_at_a_time = Options(policy="fixed", max_batch_size=1)
    with pytest.raises(DSparkError, match="out of memory"):
        list(Evaluator(models, texts, regimes, Plan(tokens=8), one_at_a_time).run())
