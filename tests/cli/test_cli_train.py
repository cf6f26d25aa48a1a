"""`dspark train` from the command line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dspark import DSparkDecoder
from dspark.cli import main, train
from dspark.cli.train_settings import NEEDS, SHAPE, settings_of
from dspark.errors import ConfigError
from dspark.train.losses import Objective
from dspark.train.settings import DataSettings, Settings
from dspark.train.shape import Shape
from training import write_chats


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory, decoders: Callable[..., DSparkDecoder]) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", decoders(draft=None), count=12)


def command(output: Path, chats: Path, *more: str) -> list[str]:
    small = "--layers 1 --markov-rank 4 --block-size 3 --anchors 4 --steps 2 --sequences 2 --held-out 0.2"
    return ["train", "--target", "tiny", "--output", str(output), "--data", str(chats), *small.split(), *more]


def test_a_run_and_its_gates(
    tmp_path: Path,
    chats: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("tensorboard")
    assert main([*command(tmp_path / "run", chats, "--tensorboard", "--dpace", "--bf16"), "--json"]) == 0
    shown = capsys.readouterr()
    outcome = json.loads(shown.out)
    assert outcome["finished"]
    assert outcome["steps"] == 2
    assert set(outcome["held_out"]) == {"1", "0.7", "0"}
    assert len(outcome["held_out"]["1"]["by_position"]) == 3
    assert "conversations of" in shown.err
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    losses = {one["step"]: one["loss"] for one in log if "loss" in one}
    assert {one.step: one.value for one in board.Scalars("loss")} == pytest.approx(losses)
    assert "held_out/0.7/expected_length" in board.Tags()["scalars"]
    monkeypatch.setattr("dspark.train.check.overfit", lambda *given: {"overfit": 1.0})
    # A draft of two steps proves nothing.
    assert main([*command(tmp_path / "run", chats), "--check", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["verdict"] == "inconclusive"
    trained = ["--target", "tiny", "--output", str(tmp_path / "none"), "--data", str(chats)]
    assert main(["train", *trained, "--start", "tiny-draft", "--check", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "passed"


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--ce", "x"], "--ce"),
        (["--held-out", "1.5"], "held_out"),
        (["--temperature", "1", "2", "3"], "--temperature"),
        (["--vocabulary", "100", "--packaging", "flat"], "speculators"),
        (["--steps", "0"], "steps"),
        (["--data", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["--mask-token-id", "-1"], "mask_token_id"),
        (["--save-dtype", "bf16"], "save_dtype"),
        (["--attention", "fast"], "attention"),
        (["--parallel", "tp"], "parallel"),
        (["--prompts", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["--openers", "/nowhere.txt", "--self-prompts", "1"], "/nowhere.txt"),
        (["--threads", "0"], "--threads"),
        (["--clip", "-1"], "clip"),
        (["--packaging", "flat", "--lean"], "lean"),
        (["--start-layers", "9"], "start_layers"),
        (["--start", "tiny-draft"], "--layers is for a new draft"),
        (["--template-option", "thinking=false"], "has no chat template to give thinking to"),
        (["--openers", "o.txt"], "--openers needs --self-prompts"),
        (["--samples", "1"], "--samples needs --prompts"),
        (["--generate-with", "tiny-draft"], "--generate-with needs --prompts or --self-prompts"),
        (["--markov-head", "none"], "--markov-rank needs a --markov-head other than none"),
        (["--confidence", "1", "--no-confidence"], "--confidence needs a confidence head, not --no"),
        (["--muon-factor", "0.0"], "--muon-factor needs --muon"),
        (["--early-share", "0.25"], "--early-share needs --early-ce"),
        (["--cache-limit", "4"], "--cache-limit needs --cache"),
    ],
)
def test_what_cannot_be_is_one_line(
    tmp_path: Path, chats: Path, capsys: pytest.CaptureFixture[str], more: list[str], named: str
) -> None:
    assert main(command(tmp_path / "run", chats, *more)) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert named in last
    assert "unexpected" not in last


def parsed(*more: str) -> Settings:
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    base = ["--target", "tiny", "--output", "run", "--self-prompts", "1", *more]
    return settings_of(parser.parse_args(base))


def test_flags_that_need_others_say_the_settings_own_defaults() -> None:
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    helps = {action.option_strings[-1]: action.help or "" for action in parser._actions}
    data, goal = DataSettings(), Objective()
    numbers = {
        "samples": data.samples,
        "cache-limit": data.cache_limit / 1e9,
        "confidence": goal.confidence,
        "early-share": goal.early_share,
        "muon-factor": parsed().muon_factor,
    }
    for flag, number in numbers.items():
        assert flag in NEEDS and f"(default: {number:g})" in helps[f"--{flag}"], flag
    assert (parsed().data.samples, parsed().data.cache_limit, parsed().goal) == (1, data.cache_limit, goal)
    given = parsed("--cache", "c", "--cache-limit", "9", "--muon", "--muon-factor", "2", "--early-ce", "0.5")
    assert (given.data.cache_limit, given.muon_factor) == (9_000_000_000, 2.0)


def test_a_draft_to_start_from_has_its_own_shape() -> None:
    assert (
        parsed().shape
        == parsed("--layers", "5", "--block-size", "7", "--markov-rank", "256").shape
        == Shape()
    )
    assert parsed("--template-option", "thinking=false").data.template_options == {"thinking": False}
    assert parsed("--no-confidence", "--taps", "0", "2").shape == Shape(confidence=False, taps=(0, 2))
    assert parsed("--start", "d", "--training-block-size", "9").shape == Shape(training_block_size=9)
    for flag in SHAPE:
        if flag not in ("training-block-size", "no-confidence"):
            with pytest.raises(ConfigError, match=f"--{flag} is for a new draft"):
                parsed("--start", "d", f"--{flag}", "5")


def test_one_process_checks_and_prints(
    tmp_path: Path, chats: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    monkeypatch.setattr("dspark.train.prepare.generate_only", lambda *_: made.append("generated") or [])
    monkeypatch.setattr("dspark.train.check.check", lambda *_: made.append("checked") or {"passed": True})
    monkeypatch.setattr("dspark.train.run.train", lambda *_: {"steps": 2})
    for rank, expected, lines in (("1", ["generated"], 0), ("0", ["generated", "checked"], 3)):
        made.clear()
        monkeypatch.setenv("RANK", rank)
        for more in (["--generate-only"], ["--check"], []):
            assert main([*command(tmp_path / "run", chats, *more), "--json"]) == 0
        assert made == expected
        assert len([line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]) == lines


def test_nothing_to_train_on_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--target", "tiny", "--output", str(tmp_path)]) == 2
    assert "nothing to train on" in capsys.readouterr().err
