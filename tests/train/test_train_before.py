"""Mistakes are said before hours of generation, not after them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark import DSparkDecoder
from dspark.errors import CheckpointError, ConfigError, DSparkError
from dspark.pretrained import resolve
from dspark.text import Tokenizer
from dspark.train import before, prepare
from dspark.train.before import check_first
from dspark.train.data.generate import Sampling
from dspark.train.gather import read_openers
from dspark.train.losses import Objective
from dspark.train.prepare import prepare as prepared
from dspark.train.run import train
from dspark.train.settings import Settings
from dspark.train.world import World
from training import small_run, write_chats

ALONE = World(0, 1, torch.device("cpu"))
TARGET = resolve("tiny", "target")
TOKENIZER = Tokenizer.from_directory(TARGET)


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be generated."""

    def generate(*_: object) -> None:
        raise AssertionError("generated something")

    monkeypatch.setattr(prepare, "generate", generate)


def asked(tmp_path: Path, **changes: Any) -> Settings:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    data = {"files": (), "prompts": prompts} | changes.pop("data", {})
    return small_run(tmp_path / "run", tmp_path, data=data, **changes)


@pytest.mark.usefixtures("never")
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"packaging": "odd"}, "packaging must be one of"),
        ({"packaging": "flat", "shape": {"vocabulary": 100}}, "needs speculators"),
        ({"packaging": "flat", "save_head": False}, "flat always stores the head"),
        ({"shape": {"markov_head_type": "lstm"}}, "markov_head_type"),
        ({"shape": {"taps": (9,)}}, "taps"),
        ({"shape": {"block_size": 9, "training_block_size": 4}}, "block_size"),
        ({"start_layers": (1, 2)}, "start_layers"),
        ({"start_layers": (60,)}, "start_layers"),
        ({"failed_anchors": 0.5}, "without a draft do not say"),
        ({"start": "tiny-draft", "shape": {"training_block_size": 2}}, "training_block_size"),
        ({"target": "/nowhere"}, "nowhere"),
        ({"data": {"files": (Path("/nowhere"),)}}, "data names /nowhere"),
    ],
)
def test_said_before_generation(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(DSparkError, match=named):
        prepared(asked(tmp_path, **changes), ALONE, print)


def test_what_is_right_gets_as_far_as_generation(tmp_path: Path, never: None) -> None:
    with pytest.raises(AssertionError, match="generated something"):
        prepared(asked(tmp_path, muon=True), ALONE, print)


@pytest.mark.parametrize(
    ("changes", "processes", "named"),
    [
        ({}, 3, "4 sequences per step are not a multiple of the 3"),
        ({"muon": True, "parallel": "fsdp"}, 2, "whole matrices"),
        ({"tensorboard": True}, 1, "TensorBoard"),
    ],
)
def test_what_the_machine_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], processes: int, named: str
) -> None:
    monkeypatch.setattr(
        before, "find_spec", lambda name: None if name == "tensorboard" else util.find_spec(name)
    )
    settings = asked(tmp_path, **({"shape": {"mask_token_id": 0}} | changes))
    with pytest.raises(ConfigError, match=named):
        check_first(settings, TARGET, None, processes, None)


def test_a_draft_of_another_target_is_refused_before_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = before.read_target_config(TARGET)
    settings = asked(tmp_path, start="tiny-draft")
    for changes, named in (({"hidden_size": 64}, "hidden size"), ({"num_hidden_layers": 2}, "reads layer")):
        other = dataclasses.replace(sizes, **changes)  # type: ignore[type-var, arg-type]
        monkeypatch.setattr(before, "read_target_config", lambda _, other=other: other)
        monkeypatch.setattr(before, "borrowed_tensors", lambda *_: {})
        with pytest.raises(ConfigError, match=named):
            check_first(settings, TARGET, None, 1, None)


def test_autocast_that_this_cpu_does_slowly_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    check_first(asked(tmp_path), TARGET, TOKENIZER, 1, None)
    assert not caplog.messages
    check_first(asked(tmp_path, bf16=True), TARGET, TOKENIZER, 1, None)
    assert caplog.messages == ["bf16: this CPU multiplies bfloat16 slowly: float32 is several times as fast"]


@pytest.mark.usefixtures("never")
@pytest.mark.parametrize(
    "whose",
    [{"target": "other"}, {"taps": [0, 1]}, {"dtype": "torch.float64"}],
    ids=lambda whose: next(iter(whose)),
)
def test_states_of_another_teacher_are_refused_before_generation(
    tmp_path: Path, whose: dict[str, Any]
) -> None:
    settings = asked(tmp_path, shape={"mask_token_id": 0}, data={"cache": tmp_path}, dtype="float32")
    ours = {"target": "tiny", "taps": list(settings.shape.taps or ()), "dtype": "torch.float32"}
    (tmp_path / "index.json").write_text(json.dumps(ours))
    check_first(settings, TARGET, TOKENIZER, 1, None)
    (tmp_path / "index.json").write_text(json.dumps(ours | whose))
    with pytest.raises(CheckpointError, match="name another cache"):
        check_first(settings, TARGET, None, 1, None)


@pytest.mark.usefixtures("never")
def test_a_mask_that_cannot_be_found_is_said_before_generation(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mask_token_id"):
        check_first(asked(tmp_path), TARGET, None, 1, None)


def test_changes_and_another_optimiser_are_refused(
    tmp_path: Path, decoders: Callable[..., DSparkDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", decoders(draft=None), count=8)
    run: dict[str, Any] = {"pace": {"steps": 2, "sequences": 1}, "data": {"held_out": 0.0}}
    train(small_run(tmp_path / "run", chats, **run), print)
    more = run | {"pace": {"steps": 3, "sequences": 1}}
    with pytest.raises(ConfigError, match="choice of Muon"):
        train(small_run(tmp_path / "run", chats, muon=True, accept_changes=True, **more), print)
    with pytest.raises(ConfigError, match="no conversation says where a verify pass failed"):
        train(small_run(tmp_path / "other", chats, failed_anchors=0.5, **run), print)
    monkeypatch.setattr(prepare, "generate", lambda *_: pytest.fail("generated something"))
    with pytest.raises(ConfigError, match="learning_rate"):
        train(small_run(tmp_path / "run", chats, learning_rate=1e-4, **run), print)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"clip": -1.0}, "clip"),
        ({"clip": math.nan}, "clip"),
        ({"warmup": 1.0}, "warmup"),
        ({"warmup": -0.1}, "warmup"),
        ({"cooldown": 0.0}, "cooldown"),
        ({"learning_rate": math.inf}, "learning_rate"),
        ({"muon_factor": 0.0}, "muon_factor"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"context_noise": -0.1}, "context_noise"),
        ({"held_out_sequences": -1}, "held_out_sequences"),
        ({"held_out_anchors": 0}, "held_out_anchors"),
        ({"seed": -1}, "seed"),
        ({"goal": Objective(decay=-1.0)}, "decay"),
        ({"goal": Objective(early_cross_entropy=1.5)}, "early_cross_entropy"),
        ({"goal": Objective(cross_entropy=-0.1)}, "cross_entropy"),
        ({"pace": {"checkpoint_seconds": -1.0}}, "checkpoint_seconds"),
        ({"pace": {"stop_after": -1.0}}, "stop_after"),
        ({"data": {"samples": 0}}, "samples"),
        ({"data": {"self_prompts": -1}}, "self_prompts"),
        ({"data": {"batch_size": 0}}, "batch_size"),
        ({"data": {"max_length": 1}}, "max_length"),
        ({"data": {"cache_limit": -1}}, "cache_limit"),
        ({"data": {"sampling": Sampling(temperatures=(1.0, 0.5))}}, "temperatures"),
        ({"data": {"sampling": Sampling(temperatures=(-1.0, 0.5))}}, "temperature"),
        ({"data": {"sampling": Sampling(top_p=1.5)}}, "top_p"),
    ],
)
def test_numbers_that_cannot_be(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(DSparkError, match=named):
        small_run(tmp_path, tmp_path, **changes)


def test_a_run_is_not_its_own_data(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    chats = folder / "chats.jsonl"
    chats.write_text('{"token_ids": [1, 2, 3, 4], "answer_start": 2}\n')
    for output, cache in ((folder / "run", None), (tmp_path / "run", folder / "states")):
        with pytest.raises(ConfigError, match=r"is inside .*work, which --data reads whole"):
            train(small_run(output, chats, data={"files": (folder,), "cache": cache}), print)


def test_prompts_under_the_name_of_made_up_ones(tmp_path: Path) -> None:
    prompts = tmp_path / "self-made.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    with pytest.raises(ConfigError, match="rename the file"):
        train(small_run(tmp_path / "run", prompts, data={"prompts": prompts, "self_prompts": 64}), print)


def test_openers_as_windows_writes_them(tmp_path: Path) -> None:
    openers = tmp_path / "openers.txt"
    openers.write_bytes(b"\xef\xbb\xbfWrite a\r\n\r\nWhy is\r\n")
    assert read_openers(openers) == ["Write a", "Why is"]
    openers.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"openers\.txt cannot be read"):
        read_openers(openers)
