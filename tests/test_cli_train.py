"""`dspark train` from the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dspark import DSparkDecoder
from dspark.cli import main
from training import write_chats


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory, decoders: Callable[..., DSparkDecoder]) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", decoders(draft=None), count=12)


def command(output: Path, chats: Path, *more: str) -> list[str]:
    small = "--layers 1 --markov-rank 4 --block-size 3 --anchors 4 --steps 2 --sequences 2 --held-out 0.2"
    return ["train", "--target", "tiny", "--output", str(output), "--data", str(chats), *small.split(), *more]


def test_a_run_and_its_gates(tmp_path: Path, chats: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard")
    assert main([*command(tmp_path / "run", chats, "--tensorboard", "--dpace", "--bf16"), "--json"]) == 0
    shown = capsys.readouterr()
    outcome = json.loads(shown.out)
    assert outcome["finished"]
    assert outcome["steps"] == 2
    assert set(outcome["held_out"]) == {"1", "0.7", "0"}
    assert len(outcome["held_out"]["1"]["by_position"]) == 3
    assert "conversations of" in shown.err
    assert list((tmp_path / "run" / "tensorboard").iterdir())
    assert main([*command(tmp_path / "run", chats), "--check", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"]


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
        (["--openers", "/nowhere.txt"], "/nowhere.txt"),
        (["--threads", "0"], "--threads"),
    ],
)
def test_what_cannot_be_is_one_line(
    tmp_path: Path, chats: Path, capsys: pytest.CaptureFixture[str], more: list[str], named: str
) -> None:
    assert main(command(tmp_path / "run", chats, *more)) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert named in last
    assert "unexpected" not in last


def test_nothing_to_train_on_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--target", "tiny", "--output", str(tmp_path)]) == 2
    assert "nothing to train on" in capsys.readouterr().err
