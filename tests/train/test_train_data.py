"""Conversations: read, generated, sifted, split."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from dspark import DSparkDecoder, SamplingParams
from dspark.errors import (
    CheckpointError,
    RequestError,
)
from dspark.target.load import read_target_config
from dspark.text import Tokenizer
from dspark.train import gather
from dspark.train.data import generate
from dspark.train.data.conversations import Conversation, Sieve, frequent_tokens, split
from dspark.train.data.generate import Asked, Sampling, answer, read_prompts
from dspark.train.data.read import ChatMarks, read_conversations
from dspark.train.data.shards import PER_SHARD, Shards
from places import TINY
from training import ALONE, CLOSES_QUESTIONS, TEMPLATE, small_run

TARGET = TINY / "target"
VOCABULARY = 512
SIZES = read_target_config(TARGET)


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded target with a chat template."""
    path = tmp_path_factory.mktemp("chatty") / "target"
    shutil.copytree(TARGET, path)
    settings = {"chat_template": TEMPLATE, "eos_token": "<|endoftext|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    return path


@pytest.fixture(scope="module")
def decoder(chatty: Path) -> Iterator[DSparkDecoder]:
    with DSparkDecoder.from_pretrained(chatty, None, device="cpu") as found:
        yield found


def talk(*tokens: int, start: int = 1) -> Conversation:
    return Conversation(np.array(tokens, np.int64), ((start, len(tokens)),))


def test_the_spans_of_answers_are_the_assistant_s_turns(chatty: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(chatty)
    marks = ChatMarks(tokenizer)
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "four"},
    ]
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps({"messages": messages}) + "\n\n")
    found = list(read_conversations([tmp_path], marks, VOCABULARY))
    spoken = [tokenizer.decode(one.tokens[a:b].tolist(), False) for one in found for a, b in one.answers]
    assert spoken == ["two<|endoftext|>", "four<|endoftext|>"]
    for index, one in zip((1, 3), found, strict=True):
        assert one.tokens[: one.answers[0][0]].tolist() == tokenizer.render_chat(messages[:index])
        assert one.mask().sum() == one.answer_tokens


def test_tables_of_token_ids_lose_the_end_tokens_that_fill_them(chatty: Path, tmp_path: Path) -> None:
    marks = ChatMarks(Tokenizer.from_directory(chatty))
    row = [9, *marks.opening, 7, 8, 0, 0, 0]
    save_file({"b0": np.array([row, row], np.uint16)}, tmp_path / "t.safetensors")
    found = list(read_conversations([tmp_path / "t.safetensors"], marks, VOCABULARY))
    assert [one.tokens.tolist() for one in found] == [row[:-2]] * 2
    assert found[0].answers == ((len(row) - 5, len(row) - 2),)


def test_a_template_that_only_closes_questions_refuses_nothing_but_tables(tmp_path: Path) -> None:
    target = tmp_path / "target"
    shutil.copytree(TARGET, target)
    (target / "tokenizer_config.json").write_text(json.dumps({"chat_template": CLOSES_QUESTIONS}))
    tokenizer = Tokenizer.from_directory(target)
    marks = ChatMarks(tokenizer)
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    file, table = tmp_path / "chat.jsonl", tmp_path / "t.safetensors"
    file.write_text(json.dumps({"messages": messages}) + '\n{"token_ids": [5, 6, 7], "answer_start": 1}\n')
    found = list(read_conversations([file], marks, VOCABULARY))
    start = found[0].answers[0][0]
    assert found[0].tokens[:start].tolist() == tokenizer.render_chat(messages[:1])
    assert tokenizer.decode(found[0].tokens[start:].tolist()) == " two"
    assert found[1].answers == ((1, 3),)
    save_file({"b0": np.array([[9, 7, 8]], np.uint16)}, table)
    with pytest.raises(CheckpointError, match=r"t\.safetensors: .* nothing before an answer"):
        list(read_conversations([table], marks, VOCABULARY))


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ('{"token_ids": [1, 2]}', "line 1"),
        ('{"token_ids": [[1, 2], [3, 4]], "answer_start": 1}', "line 1"),
        ('{"token_ids": [1.7, 2, 3], "answer_start": 1}', "line 1"),
        ('{"token_ids": [1, 2, 3], "answer_start": 1e400}', "line 1"),
        ('{"token_ids": [1, 2, 99999999999999999999], "answer_start": 1}', "line 1"),
        ('\n{"messages": 3}', "line 2"),
        ("not json", "line 1"),
        ("[]", "line 1"),
    ],
)
def test_bad_lines_are_named(chatty: Path, tmp_path: Path, content: str, named: str) -> None:
    (tmp_path / "bad.jsonl").write_text(content)
    with pytest.raises(CheckpointError, match=rf"bad\.jsonl: {named}"):
        list(
            read_conversations(
                [tmp_path / "bad.jsonl"], ChatMarks(Tokenizer.from_directory(chatty)), VOCABULARY
            )
        )


def test_files_that_do_not_say_where_answers_start_need_a_template(tmp_path: Path) -> None:
    (tmp_path / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "x"}]}')
    with pytest.raises(CheckpointError, match="no chat template"):
        list(read_conversations([tmp_path], None, VOCABULARY))
    with pytest.raises(CheckpointError, match="nowhere: no such file"):
        list(read_conversations([tmp_path / "nowhere"], None, VOCABULARY))
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"no \.safetensors or \.jsonl"):
        list(read_conversations([tmp_path / "empty"], None, VOCABULARY))


def test_loops_duplicates_and_empty_answers_are_left_out() -> None:
    loop, short = talk(1, *[2, 3] * 20), talk(1, 2)
    good, longer = talk(*range(30)), talk(5, *range(100, 180))
    sieve = Sieve(max_length=50)
    kept = list(sieve([loop, good, short, good, longer]))
    assert [len(one.tokens) for one in kept] == [30, 50]
    assert (sieve.looping, sieve.duplicate, sieve.too_short) == (1, 1, 1)


def test_a_prompt_is_held_out_whatever_else_there_is() -> None:
    many = [talk(i, *range(j, j + 5), start=1) for i in range(400) for j in (10, 20)]
    trained, held_out = split(many, 0.1)
    assert 40 < len(held_out) < 120
    sides = {int(one.tokens[0]) for one in trained}, {int(one.tokens[0]) for one in held_out}
    assert not sides[0] & sides[1]
    some = split(many[::-1][:100], 0.1)[1]
    assert {int(one.tokens[0]) for one in some} == {t for t in sides[1] if t >= 350}


def test_nothing_held_out_is_said(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_text('{"token_ids": [5, 6, 7], "answer_start": 1}\n')
    for share, said in ((1e-9, 2), (0.0, 1)):
        lines: list[str] = []
        settings = small_run(tmp_path / "run", file, data={"held_out": share})
        assert gather.gather(settings, [], None, SIZES, lines.append)[1] == []
        assert len(lines) == said
        assert ("nothing will be evaluated" in lines[-1]) == bool(share)


def test_a_reduced_vocabulary_counts_answers_alone() -> None:
    found = frequent_tokens([talk(9, 9, 9, 4, 4, 7, start=3)], 12, 2)
    assert found.tolist() == [4, 7]
    assert frequent_tokens([talk(9, 4, start=1)], 12, 3).tolist() == [0, 1, 4]


def test_shards_are_never_generated_twice(tmp_path: Path) -> None:
    asked: list[int] = []
    failing = [2 * PER_SHARD]

    def make(tasks: Sequence[int]) -> list[Conversation]:
        if tasks[0] in failing:
            raise KeyboardInterrupt
        asked.extend(tasks)
        return [Conversation(np.array([t, 1, 2]), ((1, 3),), np.array([2])) for t in tasks]

    tasks = range(2 * PER_SHARD + 5)
    shards = Shards(tmp_path, {"seed": 0})
    with pytest.raises(KeyboardInterrupt):
        shards.fill(tasks, make, print)
    done = [number for number in range(3) if shards.file(number).exists()]
    failing.clear()
    asked.clear()
    shards.fill(tasks, make, print)
    assert 2 not in done
    assert sorted(asked) == [task for task in tasks if task // PER_SHARD not in done]
    found = list(read_conversations([tmp_path], None, VOCABULARY))
    assert [int(one.tokens[0]) for one in found] == list(tasks)
    assert all(one.answers == ((1, 3),) and one.failed.tolist() == [2] for one in found)
    asked.clear()
    shards.fill(tasks, make, print)
    assert not asked
    broken, said = shards.file(1), list[str]()
    broken.write_bytes(broken.read_bytes()[:-8])
    shards.fill(tasks, make, said.append)
    assert sorted(asked) == list(tasks[PER_SHARD : 2 * PER_SHARD])
    assert said[0] == f"{broken}: cannot be read, and is generated again"
    assert len(list(read_conversations([tmp_path], None, VOCABULARY))) == len(tasks)
    with pytest.raises(CheckpointError, match="seed"):
        Shards(tmp_path, {"seed": 1})
    for seed in (0, 1):  # nothing was generated between
        Shards(tmp_path / "none", {"seed": seed})
    assert not (tmp_path / "none").exists()


def test_answers_of_other_openers_or_drafts_are_not_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    openers, made = tmp_path / "openers.txt", []
    openers.write_text("import \ndef \n")
    monkeypatch.setattr(gather, "invent", lambda *_: [])
    monkeypatch.setattr(gather, "answer", lambda *_: made.append(1) or [talk(1, 2, 3)])

    def run(draft: str | None = None) -> None:
        data = {"files": (), "self_prompts": 1, "openers": openers, "draft": draft}
        gather.generate(small_run(tmp_path / "run", tmp_path, data=data), ALONE, print)

    run()
    run()
    assert made == [1]
    with pytest.raises(CheckpointError, match="generated with draft None"):
        run("tiny-draft")
    openers.write_text("while \nfor \n")
    with pytest.raises(CheckpointError, match="generated with openers"):
        run()


def test_answers_are_the_target_s_own_turn_by_turn(
    decoder: DSparkDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = DSparkDecoder.generate

    def ended(*given: Any) -> object:
        return [dataclasses.replace(one, finish_reason="stop") for one in whole(*given)]

    monkeypatch.setattr(DSparkDecoder, "generate", ended)
    asked = [Asked(("def", "and then"), 0), Asked(("class",), 1)]
    sampling = Sampling(max_tokens=12)
    found = answer(decoder, asked, sampling, seed=3)
    assert len(found) == 3
    again = answer(decoder, asked, sampling, seed=3)
    assert [a.tokens.tolist() for a in found] == [b.tokens.tolist() for b in again]
    first = decoder.models.require_tokenizer().decode(found[0].tokens[slice(*found[0].answers[0])].tolist())
    messages = [
        {"role": "user", "content": "def"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "and then"},
    ]
    second = found[2]
    assert second.tokens[: second.answers[0][0]].tolist() == decoder.render_chat(messages)
    assert second.dialogue == found[0].prompt_number() != found[1].prompt_number()


def test_failed_positions_are_those_of_corrected_tokens(
    decoders: Callable[..., DSparkDecoder],
) -> None:
    result = decoders(policy="fixed").generate("import ", SamplingParams(max_tokens=40, temperature=0.0))
    found = generate.conversation(result)
    assert len(found.failed) == sum(one.accepted < one.verified for one in result.rounds) > 0
    start, at = len(result.prompt_token_ids), 1
    committed = []
    for one in result.rounds:
        at += one.committed
        if one.accepted < one.verified:
            committed.append(start + at - 1)  # the last token of such a round is the target's
    assert found.failed.tolist() == committed


def test_prompts_are_read_once_each(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"turns": ["a"]}\n{"turns": ["b", "c"]}\n{"prompt": "a"}\n')
    assert [one.turns for one in read_prompts(file, 2)] == [("a",), ("a",), ("b", "c"), ("b", "c")]
    assert [one.number for one in read_prompts(file, 2)] == [0, 1, 2, 3]
    for bad in ('{"turns": []}', '{"turns": ["a", 1]}', '{"prompt": ""}'):
        file.write_text(bad)
        with pytest.raises(RequestError, match="line 1: expected"):
            read_prompts(file, 1)
