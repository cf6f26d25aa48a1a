"""Keywords of the chat template in training, and what answers are kept apart by."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark.errors import CheckpointError, ConfigError, RequestError
from dspark.pretrained import resolve
from dspark.target.load import read_target_config
from dspark.text import Tokenizer
from dspark.train import gather, prepare
from dspark.train.data.conversations import Conversation
from dspark.train.data.generate import Sampling, user_tags
from dspark.train.data.read import read_conversations
from dspark.train.identity import LATER
from dspark.train.loop import Pace
from dspark.train.run import train
from dspark.train.settings import Settings
from training import small_run

TEMPLATE = (
    "{% set mark = 'no thoughts: ' if thinking is defined and not thinking else '' %}"
    "{% for m in messages %}[{{ m.role }}] {{ mark if m.role == 'assistant' and loop.last }}"
    "{{ m.content }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {{ mark }}{% endif %}"
)
"""As Qwen 3's writes its last answer and what stands before one."""
OFF = {"thinking": False}
ASKED = [{"role": "user", "content": "def run("}]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    place = tmp_path / "target"
    shutil.copytree(resolve("tiny", "target"), place)
    (place / "chat_template.jinja").write_text(TEMPLATE)
    (place / "generation_config.json").write_text('{"eos_token_id": 0}')
    return place


def settings(target: Path, **data: Any) -> Settings:
    prompts = target.parent / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": ASKED[0]["content"]}) + "\n")
    data = {"files": (), "prompts": prompts, "sampling": Sampling(max_tokens=4), "held_out": 0.0} | data
    shape = {"mask_token_id": 0}
    return small_run(target.parent / "run", target.parent, target=str(target), shape=shape, data=data)


def test_answers_are_asked_for_with_the_keywords_and_kept_apart_by_them(target: Path) -> None:
    [place] = prepare.generate_only(settings(target, template_options=OFF), print)
    [one] = read_conversations([place], None, 512)
    tokenizer = Tokenizer.from_directory(target)
    wanted = tokenizer.render_chat(ASKED, thinking=False)
    assert one.tokens[: one.answers[0][0]].tolist() == wanted != tokenizer.render_chat(ASKED)
    other = r"was generated with template_options {'thinking': False}, but None is asked for"
    with pytest.raises(CheckpointError, match=other):
        prepare.generate_only(settings(target), print)
    # Records of before there were keywords say nothing of them, since there were none.
    record = place / "generation.json"
    said = json.loads(record.read_text())
    del said["template_options"]
    record.write_text(json.dumps(said))
    assert prepare.generate_only(settings(target), print) == [place]
    with pytest.raises(CheckpointError, match="template_options None"):
        prepare.generate_only(settings(target, template_options=OFF), print)


def test_conversations_are_read_and_users_turns_are_made_with_them(target: Path) -> None:
    chats = target.parent / "chats.jsonl"
    answer = {"role": "assistant", "content": "self, name): pass"}
    chats.write_text(json.dumps({"messages": [*ASKED, answer]}))
    plain = Tokenizer.from_directory(target)
    for options in ({}, OFF):
        run = settings(target, files=(chats,), prompts=None, template_options=options)
        tokenizer = gather.tokenizer_of(run, target)
        assert tokenizer is not None
        ([one], _) = gather.gather(run, [], tokenizer, read_target_config(target), print)
        before = plain.render_chat(ASKED, **options)
        assert one.tokens[: one.answers[0][0]].tolist() == before
        closing = "<|endoftext|>\n[assistant] " + ("no thoughts: " if options else "")
        assert user_tags(tokenizer) == ("[user] ", closing)


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("chat_template.jinja", TEMPLATE + " ", "another tokenizer or chat template than .*target' has now"),
        ("tokenizer_config.json", '{"add_bos_token": false}', "another tokenizer or chat template"),
        ("generation_config.json", '{"eos_token_id": 0, "top_k": 9}', r"sampling .*'top_k': 0.*'top_k': 9"),
        ("generation_config.json", '{"eos_token_id": [0, 1]}', r"end_token_ids \[0\], but \[0, 1\]"),
    ],
)
def test_answers_of_other_files_beside_the_same_weights_are_not_reused(
    target: Path, file: str, content: str, named: str
) -> None:
    conversation = Conversation(np.arange(5), ((2, 5),))
    for kind, shards in gather._shards(settings(target, self_prompts=1)).items():
        shards.fill([0], lambda _: [conversation], lambda _: None)
        record = shards.directory / "generation.json"
        (target / file).write_text(content)
        only = {"prompts": None, "self_prompts": 1} if kind == "self" else {}
        with pytest.raises(CheckpointError, match=f"was generated with {named}"):
            gather._shards(settings(target, **only))
        # What older records do not say counts as the same.
        said = json.loads(record.read_text())
        record.write_text(json.dumps({key: value for key, value in said.items() if key not in LATER}))
        gather._shards(settings(target, **only))


def test_keywords_that_cannot_be_given_are_refused(target: Path) -> None:
    with pytest.raises(ConfigError, match="add_generation_prompt"):
        settings(target, template_options={"add_generation_prompt": False})
    run = settings(target, template_options=OFF)
    (target / "chat_template.jinja").unlink()
    with pytest.raises(RequestError, match="has no chat template to give thinking to"):
        prepare.generate_only(run, print)
    (target / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="no tokenizer, so no chat template to give thinking to"):
        prepare.generate_only(run, print)


def test_a_resumed_run_notices_other_keywords(target: Path) -> None:
    chats = target.parent / "chats.jsonl"
    answer = {"role": "assistant", "content": "self, name): pass"}
    chats.write_text(json.dumps({"messages": [*ASKED, answer]}))

    def run(options: dict[str, Any]) -> None:
        whole = settings(target, files=(chats,), prompts=None, template_options=options)
        train(dataclasses.replace(whole, pace=Pace(steps=1, sequences=1)), print)

    run(OFF)
    run(OFF)
    with pytest.raises(ConfigError, match="the run there was trained on other conversations"):
        run({})
