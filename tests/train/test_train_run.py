"""Whole runs: interrupted and resumed, refused, and what they leave behind."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dspark import DSparkDecoder, SamplingParams
from dspark.draft import load_draft
from dspark.errors import CapacityError, CheckpointError, ConfigError, NumericsError
from dspark.target import load_target
from dspark.train import run
from dspark.train.checkpoint import read_state
from dspark.train.lock import held
from dspark.train.optimiser import Optimiser
from dspark.train.report import reports
from dspark.train.run import train
from places import ROOT, TINY
from training import small_run, write_chats

TARGET = TINY / "target"


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory, decoders: Callable[..., DSparkDecoder]) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", decoders(draft=None))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, chats: Path) -> Path:
    output = tmp_path_factory.mktemp("finished") / "run"
    train(small_run(output, chats), print)
    return output


def weights(output: Path) -> dict[str, Tensor]:
    state = read_state(output)
    assert state is not None
    return dict(state["draft"])


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class Killed(Exception):
    pass


def dies_at(step: int) -> Callable[[str], None]:
    def say(line: str) -> None:
        if line.startswith(f"step {step}/"):
            raise Killed

    return say


@pytest.mark.parametrize("muon", [False, True])
def test_a_killed_run_resumes_to_the_same_weights(tmp_path: Path, chats: Path, muon: bool) -> None:
    plain, broken = tmp_path / "plain", tmp_path / "broken"
    train(small_run(plain, chats, muon=muon), print)
    settings = small_run(broken, chats, muon=muon)
    for step in (3, 6):
        with pytest.raises(Killed):
            train(settings, dies_at(step))
        state = read_state(broken)
        assert state is not None
        assert state["run"]["progress"]["step"] == step - 1
    outcome = train(settings, print)
    assert outcome["finished"]
    assert same(weights(plain), weights(broken))
    logs = [[json.loads(x) for x in (d / "log.jsonl").read_text().splitlines()] for d in (plain, broken)]
    assert [one.get("loss") for one in logs[0]] == [one.get("loss") for one in logs[1]]
    assert not same(weights(plain), {name: w * 1.001 for name, w in weights(plain).items()})


def test_a_kill_while_writing_leaves_the_last_state(
    tmp_path: Path, chats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, calls = tmp_path / "run", [0]
    save = torch.save

    def half(value: Any, stream: Any) -> None:
        calls[0] += 1
        if calls[0] == 4:
            stream.write(b"half a state")
            raise Killed
        save(value, stream)

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(Killed):
        train(small_run(output, chats), print)
    state = read_state(output)
    assert state is not None
    assert state["run"]["progress"]["step"] == 3
    monkeypatch.undo()
    train(small_run(output, chats), print)
    reference = tmp_path / "reference"
    train(small_run(reference, chats), print)
    assert same(weights(output), weights(reference))


def test_a_run_ends_when_its_time_is_over(
    tmp_path: Path, chats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = train(small_run(tmp_path / "run", chats, pace={"stop_after": 0.0}), print)
    assert not outcome["finished"]
    assert outcome["steps"] == 0
    # What comes before the first step counts.
    offset, clock, whole = [0.0], time.monotonic, run.states_of

    def slow(*given: Any) -> Any:
        offset[0] += 3600.0
        return whole(*given)

    monkeypatch.setattr(run, "states_of", slow)
    monkeypatch.setattr(time, "monotonic", lambda: clock() + offset[0])
    assert train(small_run(tmp_path / "run", chats, pace={"stop_after": 1800.0}), print)["steps"] == 0


def test_a_finished_run_writes_its_draft_again(tmp_path: Path, chats: Path, finished: Path) -> None:
    output = tmp_path / "run"
    shutil.copytree(finished, output)
    written = load_file(output / "draft" / "model.safetensors")
    shutil.rmtree(output / "draft")  # killed between the last state and the draft
    assert train(small_run(output, chats), print)["finished"]
    again = load_file(output / "draft" / "model.safetensors")
    assert same(written, again)
    train(small_run(output, chats, packaging="nested", save_dtype="float32"), print)
    other = load_file(output / "draft" / "model.safetensors")
    assert other.keys() < again.keys()
    assert {tensor.dtype for tensor in other.values()} == {torch.float32}
    assert same(weights(output), {n: other[n] for n in weights(output)})


def test_a_run_that_stops_at_once_writes_the_draft_of_its_state(tmp_path: Path, chats: Path) -> None:
    output = tmp_path / "run"
    with pytest.raises(Killed):
        train(small_run(output, chats), dies_at(3))
    shutil.rmtree(output / "draft")
    assert train(small_run(output, chats, pace={"stop_after": 0.0}), print)["steps"] == 2
    assert (output / "draft" / "model.safetensors").exists()


def test_gradients_that_stay_infinite_end_the_run(
    tmp_path: Path, chats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, step, wrong = tmp_path / "run", Optimiser.step, {2, 3}

    def broken(self: Optimiser, rate: float, clip: float) -> float:
        calls.append(0)
        if len(calls) in wrong:
            next(iter(self._parameters)).grad *= float("nan")  # type: ignore[operator]
        return step(self, rate, clip)

    calls: list[int] = []
    monkeypatch.setattr(Optimiser, "step", broken)
    lines: list[str] = []
    assert train(small_run(output, chats), lines.append)["skipped_steps"] == 2
    assert sum("not finite" in line for line in lines) == 2
    text = (output / "log.jsonl").read_text()
    assert "NaN" not in text
    logged = [json.loads(line) for line in text.splitlines()]
    assert [one["gradient_norm"] is None for one in logged if "loss" in one] == [
        i in (1, 2) for i in range(8)
    ]
    assert logged[-1].get("skipped", 2) == 2
    wrong.update(range(100))
    with pytest.raises(NumericsError, match="10 steps in a row"):
        train(small_run(tmp_path / "other", chats, pace={"steps": 30}), print)


def test_a_directory_is_one_run_s(tmp_path: Path, chats: Path) -> None:
    with (
        held(tmp_path / "run", print),
        pytest.raises(ConfigError, match="another run is at work"),
    ):
        train(small_run(tmp_path / "run", chats), print)
    train(small_run(tmp_path / "run", chats, pace={"stop_after": 0.0}), print)


def test_other_settings_or_data_are_not_mixed_in(tmp_path: Path, chats: Path, finished: Path) -> None:
    with pytest.raises(ConfigError, match="learning_rate"):
        train(small_run(finished, chats, learning_rate=1e-3), print)
    fewer = tmp_path / "fewer.jsonl"
    fewer.write_text("\n".join(chats.read_text().splitlines()[:20]))
    with pytest.raises(ConfigError, match="other conversations"):
        train(small_run(finished, fewer), print)


def test_cached_states_give_the_same_curve_up_to_their_precision(
    tmp_path: Path, chats: Path, finished: Path
) -> None:
    settings = small_run(tmp_path / "run", chats, data={"cache": tmp_path / "states"})
    train(settings, print)
    with pytest.raises(Killed):
        train(small_run(tmp_path / "begun", chats), dies_at(2))
    first, cached = weights(tmp_path / "begun"), weights(tmp_path / "run")
    for name, weight in weights(finished).items():
        moved, apart = float((weight - first[name]).norm()), float((weight - cached[name]).norm())
        assert apart < 0.2 * moved, (name, apart, moved)
    stored = sorted((tmp_path / "states").iterdir())
    again = small_run(tmp_path / "again", chats, data={"cache": tmp_path / "states"})
    train(again, print)
    assert sorted((tmp_path / "states").iterdir()) == stored
    assert same(weights(tmp_path / "run"), weights(tmp_path / "again"))
    other = small_run(tmp_path / "o", chats, shape={"taps": (0, 1)}, data={"cache": tmp_path / "states"})
    with pytest.raises(CheckpointError, match="another cache"):
        train(other, print)


def test_a_cache_beyond_its_limit_is_refused_before_it_starts(tmp_path: Path, chats: Path) -> None:
    data = {"cache": tmp_path / "states", "cache_limit": 1000}
    with pytest.raises(CapacityError, match="GB"):
        train(small_run(tmp_path / "run", chats, data=data), print)
    assert not list((tmp_path / "states").glob("states-*"))


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        ({}, {"packaging": "flat"}),
        ({"markov_head_type": "rnn"}, {"packaging": "nested"}),
        ({"markov_head_type": "gated", "vocabulary": 300}, {}),
        ({"markov_head_type": "none", "vocabulary": 300}, {"save_head": False}),
        ({"confidence": False, "training_block_size": 8}, {"packaging": "speculators"}),
    ],
)
def test_the_result_loads_and_decodes(
    tmp_path: Path, chats: Path, shape: dict[str, Any], changes: dict[str, Any]
) -> None:
    settings = small_run(tmp_path / "run", chats, shape=shape, save_dtype="float32", **changes)
    train(settings, print)
    draft = load_draft(tmp_path / "run" / "draft", target=load_target(TARGET))
    config = draft.config
    assert config.block_size == 4
    assert config.training_block_size == shape.get("training_block_size", 4)
    assert config.markov_head_type == {"none": None}.get(*[shape.get("markov_head_type", "vanilla")] * 2)
    assert config.reduced == ("vocabulary" in shape)
    assert config.own_head == (changes.get("packaging") != "nested" and changes.get("save_head", True))
    params = SamplingParams(max_tokens=24, temperature=0.0)
    with DSparkDecoder.from_pretrained("tiny", tmp_path / "run" / "draft", device="cpu") as decoder:
        found = decoder.generate("def run(", params)
    with DSparkDecoder.from_pretrained("tiny", None, device="cpu") as decoder:
        assert found.token_ids == decoder.generate("def run(", params).token_ids
    assert sum(one.drafted for one in found.rounds) > 0


def test_a_run_can_start_from_a_draft(tmp_path: Path, chats: Path, finished: Path) -> None:
    settings = small_run(tmp_path / "run", chats, start=str(finished / "draft"), learning_rate=1e-9)
    train(settings, print)
    was, now = weights(finished), weights(tmp_path / "run")
    assert was.keys() == now.keys()
    assert all(torch.allclose(was[name], now[name], atol=5e-3, rtol=1e-2) for name in was)  # bf16 between


def test_a_draft_may_be_trained_at_another_width(tmp_path: Path, chats: Path, finished: Path) -> None:
    start = str(finished / "draft")
    settings = small_run(
        tmp_path / "run", chats, start=start, shape={"training_block_size": 6}, pace={"steps": 1}
    )
    train(settings, print)
    config = load_draft(tmp_path / "run" / "draft", target=load_target(TARGET)).config
    assert (config.block_size, config.training_block_size) == (4, 6)


def test_layers_may_start_as_the_target_s(tmp_path: Path, chats: Path) -> None:
    settings = small_run(tmp_path / "run", chats, start_layers=(4,), learning_rate=1e-12)
    train(settings, print)
    stored = load_file(TARGET / "model.safetensors")
    found = weights(tmp_path / "run")
    name = "layers.{}.self_attn.q_proj.weight"
    assert torch.allclose(found[name.format(0)], stored["model." + name.format(4)], atol=1e-6)
    with pytest.raises(ConfigError, match="start_layers"):
        train(small_run(tmp_path / "two", chats, start_layers=(3, 4)), print)


def test_autocast_computes_in_bfloat16(tmp_path: Path, chats: Path, finished: Path) -> None:
    def first_step(output: Path) -> dict[str, Any]:
        return next(one for one in reports(output) if "loss" in one)

    train(small_run(tmp_path / "run", chats, bf16=True), print)
    whole, half = first_step(finished), first_step(tmp_path / "run")
    for name in ("loss", "gradient_norm"):
        assert half[name] == pytest.approx(whole[name], rel=0.05) and half[name] != whole[name]
    assert {w.dtype for w in weights(tmp_path / "run").values()} == {torch.float32}


@pytest.mark.long
def test_a_run_that_is_killed_at_any_moment_ends_in_the_same_weights(tmp_path: Path, chats: Path) -> None:
    """SIGKILL: nothing is cleaned up, and nothing is flushed."""
    pace = {"steps": 40}
    train(small_run(tmp_path / "whole", chats, pace=pace, data={"cache": tmp_path / "states"}), print)
    code = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests" / "support")!r})
from pathlib import Path
from training import small_run
from dspark.train.run import train
data = {{"cache": Path({str(tmp_path / "killed states")!r})}}
train(small_run(Path({str(tmp_path / "killed")!r}), Path({str(chats)!r}), pace={pace}, data=data), print)
"""
    moments, killed, over = random.Random(1), 0, False
    while not over:
        with subprocess.Popen([sys.executable, "-u", "-c", code], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            for _ in range(moments.randint(1, 16)):  # of the start, and of steps
                if not (line := process.stdout.readline()):
                    break
            over = not line and process.wait() == 0
            if not over:
                time.sleep(moments.uniform(0.0, 0.05))
                process.kill()
                killed += 1
        assert killed < 60, "it gets nowhere"
    assert killed > 2
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "killed"))
