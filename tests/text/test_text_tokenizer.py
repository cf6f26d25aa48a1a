"""The tokenizer of a checkpoint directory, and the ids that end a text."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from dspark.errors import CheckpointError, RequestError
from dspark.text import Tokenizer, eos_token_ids
from places import TINY

TARGET = TINY / "target"


def write(directory: Path, name: str, value: Any) -> None:
    (directory / name).write_text(json.dumps(value), encoding="utf-8")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    shutil.copy(TARGET / "tokenizer.json", tmp_path)
    return tmp_path


def test_text_goes_to_ids_and_back() -> None:
    tokenizer = Tokenizer.from_directory(TARGET)
    text = "Once upon a time, 3 löwen \U0001fae0\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == 512
    assert tokenizer.eos_token_ids == (0,)
    assert tokenizer.encode("") == []


def test_special_tokens_in_a_text_are_single_ids_and_hidden_again() -> None:
    tokenizer = Tokenizer.from_directory(TARGET)
    ids = tokenizer.encode("a<|endoftext|>b")
    assert 0 in ids
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|endoftext|>b"


def test_a_directory_without_a_tokenizer_says_what_still_works(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json.*token ids"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("content", ["", "{", '{"version": "1.0"}'])
def test_a_damaged_tokenizer_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a readable tokenizer"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "hi"),
        ({"add_bos_token": False}, "hi"),
        ({"add_bos_token": None}, "hi"),
        ({"add_bos_token": True, "bos_token": "<|mask|>"}, "<|mask|>hi"),
        ({"add_bos_token": True, "bos_token": {"content": "<|mask|>"}}, "<|mask|>hi"),
        ({"add_eos_token": True, "eos_token": "<|endoftext|>"}, "hi<|endoftext|>"),
        ({"add_bos_token": True, "bos_token": "<|mask|>", "add_eos_token": True, "eos_token": "<|mask|>"},)
        * 1
        + ("<|mask|>hi<|mask|>",),
    ],
)
def test_beginning_and_end_tokens_are_added_as_the_checkpoint_says(
    checkpoint: Path, settings: dict[str, Any], expected: str
) -> None:
    write(checkpoint, "tokenizer_config.json", settings)
    tokenizer = Tokenizer.from_directory(checkpoint)
    assert tokenizer.decode(tokenizer.encode("hi"), skip_special_tokens=False) == expected


def test_the_tokenizers_own_rule_holds_where_the_settings_say_nothing(checkpoint: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|mask|> $A", special_tokens=[("<|mask|>", 1)]
    )
    backend.enable_truncation(4)
    backend.enable_padding(length=99)
    backend.save(str(checkpoint / "tokenizer.json"))
    tokenizer = Tokenizer.from_directory(checkpoint)
    ids = tokenizer.encode("a long enough prompt")
    assert ids[0] == 1
    # Truncation and padding saved for training do not touch prompts.
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|mask|>a long enough prompt"


def test_the_older_file_of_special_tokens_is_read(checkpoint: Path) -> None:
    write(checkpoint, "special_tokens_map.json", {"bos_token": "<|mask|>"})
    write(checkpoint, "tokenizer_config.json", {"add_bos_token": True})
    assert Tokenizer.from_directory(checkpoint).encode("hi")[0] == 1


@pytest.mark.parametrize("named", [{}, {"bos_token": None}, {"bos_token": "<nowhere>"}])
def test_a_beginning_token_that_does_not_exist_is_refused(checkpoint: Path, named: dict[str, Any]) -> None:
    write(checkpoint, "tokenizer_config.json", {"add_bos_token": True} | named)
    with pytest.raises(CheckpointError, match="add_bos_token"):
        Tokenizer.from_directory(checkpoint)


@pytest.mark.parametrize("prompt", [None, 3, b"bytes", "half a pair \ud83e"])
def test_what_is_no_text_is_a_request_error(prompt: Any) -> None:
    with pytest.raises(RequestError, match="prompt"):
        Tokenizer.from_directory(TARGET).encode(prompt)


def test_decoding_ignores_ids_beyond_the_vocabulary_and_refuses_what_is_no_id() -> None:
    tokenizer = Tokenizer.from_directory(TARGET)
    assert tokenizer.decode([*tokenizer.encode("hi"), 511 + 400]) == "hi"
    for ids in ([-1], ["a"]):
        with pytest.raises(RequestError, match="token ids"):
            tokenizer.decode(ids)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [7, 2, 7]}, {"eos_token_id": 1}, (7, 2)),
        ({"eos_token_id": 0}, {"eos_token_id": 1}, (0,)),
        ({}, {"eos_token_id": 1}, (1,)),
        ({"eos_token_id": None}, {"eos_token_id": [3]}, (3,)),
        (None, {"eos_token_id": 1}, (1,)),
        (None, {}, ()),
        (None, None, ()),
    ],
)
def test_end_tokens_come_from_the_generation_settings_first(
    tmp_path: Path, generation: Any, config: Any, expected: tuple[int, ...]
) -> None:
    for name, value in (("generation_config.json", generation), ("config.json", config)):
        if value is not None:
            write(tmp_path, name, value)
    assert eos_token_ids(tmp_path) == expected


@pytest.mark.parametrize("found", ["</s>", [1, "2"], True, -1, 1.5, 2**31, [0, 2**40]])
def test_an_end_token_that_is_no_id_is_refused(tmp_path: Path, found: Any) -> None:
    write(tmp_path, "config.json", {"eos_token_id": found})
    with pytest.raises(CheckpointError, match=r"config\.json: eos_token_id"):
        eos_token_ids(tmp_path)


@pytest.mark.parametrize("content", ["[1]", "{", "\xff"])
def test_damaged_settings_are_named(checkpoint: Path, content: str) -> None:
    (checkpoint / "tokenizer_config.json").write_text(content, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        Tokenizer.from_directory(checkpoint)


def test_a_long_text_is_read_as_a_short_one_while_other_threads_go_on() -> None:
    tokenizer = Tokenizer.from_directory(TARGET)
    text = "the river and the boat, the house by the sea. " * 8000
    expected = tokenizer.backend.encode(text).ids
    started, over, ticks = threading.Event(), threading.Event(), []

    def tick() -> None:
        started.set()
        while not over.is_set():
            ticks.append(1)
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        started.wait()
        before = len(ticks)
        ids = tokenizer.encode(text)
        meanwhile = len(ticks) - before
    finally:
        over.set()
        thread.join()
    assert ids == expected
    assert meanwhile > 2


def test_settings_nested_without_end_are_named(checkpoint: Path) -> None:
    (checkpoint / "tokenizer_config.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json cannot be read as JSON"):
        Tokenizer.from_directory(checkpoint)
