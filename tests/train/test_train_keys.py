"""What tells conversations apart: keys, held-out shares, and tokens that are not the target's."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from dspark.errors import CheckpointError
from dspark.pretrained import resolve
from dspark.target import load_target
from dspark.text import Tokenizer
from dspark.train.cache import StateCache
from dspark.train.data.conversations import Conversation, evaluated, fingerprint
from dspark.train.data.read import ChatMarks, read_conversations
from dspark.train.data.shards import PER_SHARD, Shards
from dspark.train.teacher import Teacher
from training import TEMPLATE

VOCABULARY = 512
TURNS = [
    {"role": role, "content": text}
    for role, text in (("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four"))
]


def talk(*tokens: int, start: int = 1, dialogue: int | None = None) -> Conversation:
    return Conversation(np.array(tokens, np.int64), ((start, len(tokens)),), dialogue=dialogue)


def test_a_shard_whose_tasks_gave_nothing_reads_as_nothing(tmp_path: Path) -> None:
    tasks = range(PER_SHARD + 1)
    Shards(tmp_path, {}).fill(tasks, lambda some: [talk(1, 2, 3)] if len(some) == 1 else [], print)
    assert [len(one.tokens) for one in read_conversations([tmp_path], None, VOCABULARY)] == [3]


@pytest.mark.parametrize("kind", ["jsonl", "safetensors"])
@pytest.mark.parametrize("token", [VOCABULARY, -1])
def test_tokens_that_the_target_does_not_have_are_named(tmp_path: Path, kind: str, token: int) -> None:
    file = tmp_path / f"chats.{kind}"
    rows = [[5, 6, 7], [5, token, 7]]
    if kind == "jsonl":
        file.write_text("\n".join(json.dumps({"token_ids": row, "answer_start": 1}) for row in rows))
    else:
        lengths = {"lengths": np.array([3, 3]), "answer_start": np.array([1, 1])}
        save_file({"tokens": np.array(rows, np.int64).ravel(), **lengths}, file)
    with pytest.raises(CheckpointError, match=rf"chats\.{kind}: conversation 1 has the token {token}"):
        list(read_conversations([file], None, VOCABULARY))
    if token > 0:
        assert len(list(read_conversations([file], None, VOCABULARY + 1))) == 2


def test_an_answer_that_starts_outside_of_its_tokens_is_named(tmp_path: Path) -> None:
    for start in (-1, 4):
        (tmp_path / "c.jsonl").write_text(json.dumps({"token_ids": [5, 6, 7], "answer_start": start}))
        with pytest.raises(CheckpointError, match=rf"conversation 0: an answer starts at {start}"):
            list(read_conversations([tmp_path], None, VOCABULARY))


def test_a_key_is_of_tokens_and_answers(tmp_path: Path) -> None:
    whole = talk(*range(10, 30), start=2)
    others = [talk(*range(10, 30), start=9), dataclasses.replace(whole, answers=((2, 5), (9, 20)))]
    keys = {one.key() for one in (whole, *others)}
    assert len(keys) == 3
    assert all(len(key) == 32 for key in keys)
    assert whole.key() == talk(*range(10, 30), start=2).key()
    assert len({fingerprint([key]) for key in keys}) == 3
    teacher = Teacher(load_target(resolve("tiny", "target")), (0,))
    cache = StateCache(tmp_path, {}, print)
    cache.fill([others[0]], teacher, lambda done, total: None)
    assert cache.missing([whole, others[0]]) == [whole]
    cache.fill([whole], teacher, lambda done, total: None)
    (stored,), (own,) = cache.states([whole]), teacher.states([whole])
    assert torch.equal(stored.normalisers, own.normalisers)


def test_a_prompt_s_side_is_that_of_its_tokens_alone() -> None:
    one = talk(7, 8, 9, 10, start=2)
    assert one.prompt_number() == talk(7, 8, 30, 40, 50, start=2).prompt_number()
    assert one.is_held_out((one.prompt_number() + 2**20) / 2.0**64)
    assert not one.is_held_out((one.prompt_number() - 2**20) / 2.0**64)


def test_all_turns_of_a_dialogue_are_on_one_side(tmp_path: Path) -> None:
    tokenizer = templated(tmp_path / "target")
    chats, shards = tmp_path / "chats", Shards(tmp_path / "shards", {})
    chats.mkdir()
    dialogues = [[{**one, "content": f"{one['content']} {i}"} for one in TURNS] for i in range(40)]
    (chats / "c.jsonl").write_text("\n".join(json.dumps({"messages": one}) for one in dialogues))
    read = list(read_conversations([chats], ChatMarks(tokenizer), VOCABULARY))
    shards.fill(range(1), lambda _: read, print)
    again = list(read_conversations([shards.directory], None, VOCABULARY))
    for found in (read, again):
        sides = [
            (a.is_held_out(0.3), b.is_held_out(0.3)) for a, b in zip(found[::2], found[1::2], strict=True)
        ]
        assert all(first == second for first, second in sides)
        assert len(set(sides)) == 2
    own = [dataclasses.replace(one, dialogue=None).is_held_out(0.3) for one in read]
    assert own[::2] != own[1::2]


def templated(target: Path) -> Tokenizer:
    target.mkdir()
    (target / "tokenizer.json").write_text((resolve("tiny", "target") / "tokenizer.json").read_text())
    settings = {"chat_template": TEMPLATE, "eos_token": "<|endoftext|>"}
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
    return Tokenizer.from_directory(target)


def test_what_is_evaluated_comes_from_all_sources() -> None:
    files, generated = ([talk(i, 1, 2, start=1) for i in some] for some in (range(300), range(300, 400)))
    found = evaluated([*files, *generated], 32)
    assert len({one.key() for one in found}) == 32
    assert 2 <= sum(int(one.tokens[0]) >= 300 for one in found) <= 20
    assert {one.key() for one in evaluated([*generated, *files], 32)} == {one.key() for one in found}
