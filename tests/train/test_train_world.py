"""Two processes on one machine (torchrun, gloo) take the steps of one."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from dspark import DSparkDecoder
from dspark.errors import ConfigError
from dspark.train import prepare
from dspark.train.checkpoint import read_state
from dspark.train.data.read import read_conversations
from dspark.train.data.shards import PER_SHARD
from dspark.train.run import train
from dspark.train.world import World, join
from places import ROOT
from training import small_run, write_chats

SCRIPT = """
import sys, torch
from pathlib import Path
sys.path.insert(0, {tests!r})
torch.set_num_threads(1)
from training import small_run
from dspark.train.run import train
from dspark.train.world import join
world = join(torch.device("cpu"))
for output, how, steps, micro_batch, cache in {runs!r}:
    data = {{}} if cache is None else {{"cache": Path(cache)}}
    more = {{"pace": {{"steps": steps}}, "data": data, "micro_batch": micro_batch, "parallel": how}}
    train(small_run(Path(output), Path({chats!r}), **more), print, world)
world.close()
"""


class Run(NamedTuple):
    """One of the runs that two processes make, one after the other."""

    output: str
    how: str
    steps: int = 3
    micro_batch: int = 4
    cache: str | None = None


def weights(output: Path) -> dict[str, Tensor]:
    state = read_state(output)
    assert state is not None
    return dict(state["draft"])


def gradient_norms(output: Path) -> list[float]:
    """Of each step, before they are clipped."""
    log = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    return [one["gradient_norm"] for one in log if "gradient_norm" in one]


def two_processes(script: Path, chats: Path, runs: list[Run]) -> None:
    plain = [tuple(run) for run in runs]
    launch(script, SCRIPT.format(tests=str(ROOT / "tests" / "support"), chats=str(chats), runs=plain))


def launch(script: Path, text: str) -> str:
    """What it printed."""
    script.write_text(text)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(script)], env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


RUNS = {"ddp-4": ("ddp", 4), "ddp-1": ("ddp", 1), "fsdp-1": ("fsdp", 1)}
"""Each process takes two of four sequences, at once or one by one."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, decoders: Callable[..., DSparkDecoder]) -> Path:
    """The folder of all runs: "one", "other" and "alone" of this process, the rest of two."""
    folder = tmp_path_factory.mktemp("runs")
    chats = write_chats(folder / "chats.jsonl", decoders(draft=None), count=16)
    train(small_run(folder / "one", chats, pace={"steps": 3}), print)
    train(small_run(folder / "other", chats, pace={"steps": 3}, seed=1), print)
    train(small_run(folder / "cached", chats, pace={"steps": 1}, data={"cache": folder / "alone"}), print)
    made = [Run(str(folder / name), how, micro_batch=size) for name, (how, size) in RUNS.items()]
    made.append(Run(str(folder / "sharing"), "ddp", steps=1, cache=str(folder / "shared")))
    two_processes(folder / "two.py", chats, made)
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_give_the_gradients_and_weights_of_one(runs: Path, name: str) -> None:
    # Clipping and Adam hide the scale of a gradient; its norm in the log is from before them.
    norms = gradient_norms(runs / "one")
    assert len(norms) == 3 and gradient_norms(runs / name) == pytest.approx(norms, rel=1e-4)
    one, two = weights(runs / "one"), weights(runs / name)
    assert one.keys() == two.keys()
    for key in one:
        # Adam divides by the root of the squared gradient: rounding grows there.
        assert float((one[key] - two[key]).abs().max()) < 1e-5, key


def test_another_seed_gives_other_weights(runs: Path) -> None:
    """By far more than the processes may differ."""
    one = weights(runs / "one")
    assert max(float((one[key] - w).abs().max()) for key, w in weights(runs / "other").items()) > 1e-3


def test_two_processes_share_the_work_of_the_cache(runs: Path) -> None:
    alone, shared = stored(runs / "alone"), stored(runs / "shared")
    assert len(shared) == 2
    assert {key for file in shared for key in file} == {key for file in alone for key in file}
    assert sum(map(len, shared)) == sum(map(len, alone))
    assert abs(len(shared[0]) - len(shared[1])) <= 1


def stored(cache: Path) -> list[list[str]]:
    """Keys of the conversations in each shard."""
    found = []
    for file in sorted(cache.glob("states-*.safetensors")):
        with safe_open(file, "pt") as tensors:
            found.append([key for key, _ in json.loads(tensors.metadata()["conversations"])])
    return found


GENERATES = """
import os, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from training import small_run
from dspark.train import gather
from dspark.train.data.generate import NO_ROOM, Sampling, answer
from dspark.train.data.shards import Shards
from dspark.train.prepare import generate_only

write, run = Shards._write, Path({output!r})


def written(shards, number, found):
    (run / f"made-{{number}}-by-{{os.environ['RANK']}}").touch()
    write(shards, number, found)


def answered(decoder, asked, sampling, seed, left_out, tokenizer):
    left_out.add(NO_ROOM)
    return answer(decoder, asked, sampling, seed, left_out, tokenizer)


Shards._write, gather.answer = written, answered
data = {{"files": (), "prompts": Path({asked!r}), "sampling": Sampling(max_tokens=2)}}
print(generate_only(small_run(run, run, data=data), print))
"""


def test_processes_share_what_is_to_be_generated(tmp_path: Path) -> None:
    asked = tmp_path / "asked.jsonl"
    asked.write_text("".join(json.dumps({"prompt": f"def f{i}("}) + "\n" for i in range(2 * PER_SHARD + 1)))
    (tmp_path / "run").mkdir()
    script = GENERATES.format(
        tests=str(ROOT / "tests" / "support"), output=str(tmp_path / "run"), asked=str(asked)
    )
    said = launch(tmp_path / "generates.py", script)
    made = sorted(path.name for path in (tmp_path / "run").glob("made-*"))
    assert made == ["made-0-by-0", "made-1-by-1", "made-2-by-0"]
    assert "of 2 shards" in said and "of 1 shards" not in said  # the main process speaks
    assert "gave up on 3 answers that had no room" in said  # for all
    found = list(read_conversations([tmp_path / "run" / "data" / "asked"], None, 4096))
    assert len(found) == 2 * PER_SHARD + 1
    assert said.count("data/asked") == 2  # both know where


def test_processes_wait_for_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, timedelta] = {}
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **more: given.update(more))
    assert join(torch.device("cpu")).rank == 1
    assert given["timeout"] >= timedelta(days=1)


def test_processes_that_see_other_files_are_refused(
    tmp_path: Path, decoders: Callable[..., DSparkDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    many = write_chats(tmp_path / "chats.jsonl", decoders(draft=None), count=12)
    fewer = tmp_path / "fewer.jsonl"
    fewer.write_text("\n".join(many.read_text().splitlines()[:9]))
    settings = small_run(tmp_path / "run", many)
    said: list[list[int]] = []

    def largest(bounds: Tensor, how: object = None) -> None:
        """The other process gave up on nothing, and said the first thing that was said."""
        if how is None:
            return
        said.append(bounds.tolist())
        bounds.copy_(torch.maximum(bounds, torch.tensor(said[0])))

    monkeypatch.setattr(torch.distributed, "all_reduce", largest)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
    world = World(0, 2, torch.device("cpu"))
    prepare.prepare(settings, world, print)
    prepare.prepare(settings, world, print)
    for other in (dataclasses.replace(settings, seed=1), small_run(tmp_path / "run", fewer)):
        with pytest.raises(ConfigError, match="a disk that all machines share"):
            prepare.prepare(other, world, print)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_two_processes_resume_to_the_same_weights(
    tmp_path: Path, decoders: Callable[..., DSparkDecoder], how: str
) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", decoders(draft=None), count=16)
    two_processes(tmp_path / "whole.py", chats, [Run(str(tmp_path / "whole"), how, steps=4)])
    script = (tmp_path / "whole.py").read_text().replace("whole", "broken")
    dying = script.replace("print, world)", "dies, world)").replace("world = join(", f"{DIES}\nworld = join(")
    with pytest.raises(AssertionError, match="ChildFailedError"):
        launch(tmp_path / "broken.py", dying)
    state = read_state(tmp_path / "broken")
    assert state is not None
    assert state["run"]["progress"]["step"] == 2
    launch(tmp_path / "broken.py", script)
    whole, broken = weights(tmp_path / "whole"), weights(tmp_path / "broken")
    assert all(float((whole[name] - broken[name]).abs().max()) < 1e-6 for name in whole)


DIES = """
def dies(line):
    print(line)
    if line.startswith("step 3/"):
        raise SystemExit("killed")
"""
