"""What the target is asked, and what is made of its answers."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dspark import DSparkDecoder, SamplingParams
from dspark.errors import CapacityError, ConfigError, NumericsError, QueueFullError
from dspark.pretrained import resolve
from dspark.text import Tokenizer
from dspark.train import gather
from dspark.train.data.generate import Asked, LeftOut, Sampling, answer, invent, render, user_tags
from training import ALONE, CLOSES_QUESTIONS, TEMPLATE, small_run

SHORT = Sampling(max_tokens=6)


def templated(place: Path, template: str) -> DSparkDecoder:
    shutil.copytree(resolve("tiny", "target"), place)
    settings = {"chat_template": template, "eos_token": "<|endoftext|>"}
    (place / "tokenizer_config.json").write_text(json.dumps(settings))
    (place / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    return DSparkDecoder.from_pretrained(place, None, device="cpu")


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DSparkDecoder]:
    with templated(tmp_path_factory.mktemp("chatty") / "target", TEMPLATE) as found:
        yield found


def test_the_engine_s_queue_holds_all_shards_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    made: list[dict[str, Any]] = []

    class Stop(Exception):
        pass

    def load(*_: object, **options: Any) -> None:
        made.append(options)
        raise Stop

    monkeypatch.setattr(DSparkDecoder, "from_pretrained", load)
    for batch_size in (1, 96, 4096):
        data = {"files": (), "prompts": prompts, "batch_size": batch_size}
        with pytest.raises(Stop):
            gather.generate(small_run(tmp_path / "run", tmp_path, data=data), ALONE, print)
    # 64 tasks a shard, and a shard more than fill the batch.
    assert [one["max_queue_size"] for one in made] == [128, 192, 65 * 64]


def test_a_target_without_a_template_gets_the_text_itself(
    decoders: Callable[..., DSparkDecoder],
) -> None:
    plain = decoders(draft=None)
    (found,) = answer(plain, [Asked(("def run(",), 0)], SHORT, seed=1)
    assert found.tokens[: found.answers[0][0]].tolist() == plain.models.require_tokenizer().encode("def run(")


def test_nobody_replies_to_half_an_answer(tmp_path: Path) -> None:
    with templated(tmp_path / "target", TEMPLATE) as decoder:
        left_out = LeftOut()
        asked = [Asked(("def", "and then"), 0), Asked(("class",), 1)]
        found = answer(decoder, asked, dataclasses.replace(SHORT, max_tokens=2), 3, left_out)
    assert [len(one.tokens) - one.answers[0][0] for one in found] == [2, 2]
    assert left_out.said() == "1 dialogues ended by an answer that --max-tokens cut"


@pytest.mark.parametrize(
    ("template", "stop", "shows"),
    [(TEMPLATE, (), False), (CLOSES_QUESTIONS, ("[/INST]",), True)],
    ids=["ends itself", "closed by a tag"],
)
def test_a_made_up_turn_ends_where_its_template_ends_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    template: str,
    stop: tuple[str, ...],
    shows: bool,
) -> None:
    texts = [("one ", "stop"), ("two [/INST] more", "stop"), ("three", "length"), ("<|endoftext|>", "stop")]
    whole, given = DSparkDecoder.generate, []

    def said(decoder: DSparkDecoder, prompts: Sequence[Any], params: Sequence[SamplingParams]) -> object:
        given.extend(params)
        results = whole(decoder, prompts, params)
        return [
            dataclasses.replace(one, text=text, finish_reason=reason)
            for one, (text, reason) in zip(results, texts, strict=True)
        ]

    with templated(tmp_path / "target", template) as decoder:
        monkeypatch.setattr(DSparkDecoder, "generate", said)
        left_out = LeftOut()
        found = invent(decoder, range(4), [], SHORT, 3, left_out)
    assert {one.stop_strings for one in given} == {stop}
    assert all(one.skip_special_tokens != shows for one in given)
    assert [one.turns[0] for one in found] == ["one", "two" if stop else "two [/INST] more"]
    assert left_out.said() == "2 made-up prompts without an end or a text"


def test_what_was_given_up_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*given: Any) -> list[Any]:
        given[4].add("odd ones", 3)
        return []

    monkeypatch.setattr(gather, "answer", nothing)
    prompts, lines = tmp_path / "prompts.jsonl", []
    prompts.write_text('{"prompt": "a"}\n')
    left_out = gather.generate(
        small_run(tmp_path / "run", tmp_path, data={"files": (), "prompts": prompts}), ALONE, lines.append
    )
    assert left_out.said() == "3 odd ones"


def test_several_turns_need_a_template(decoders: Callable[..., DSparkDecoder]) -> None:
    turns = [{"role": "user", "content": "a"}] * 2
    with pytest.raises(ConfigError, match="one turn only"):
        render(decoders(draft=None).models.require_tokenizer(), turns)


def test_a_failed_answer_ends_its_conversation_or_the_run(
    decoder: DSparkDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [Asked(("def", "and", "then"), 0), Asked(("class", "and"), 1)]
    error: list[Exception] = [CapacityError("too long")]
    sizes: list[int] = []
    whole = decoder.generate

    def failing(_: DSparkDecoder, prompts: list[list[int]], params: list[SamplingParams]) -> object:
        sizes.append(len(prompts))
        results = whole(prompts, params)
        results[0] = dataclasses.replace(results[0], token_ids=(), text="", error=error[0])
        return [dataclasses.replace(one, finish_reason="stop") for one in results]

    monkeypatch.setattr(DSparkDecoder, "generate", failing)
    left_out = LeftOut()
    assert len(answer(decoder, asked, Sampling(max_tokens=4), 3, left_out)) == 1
    assert sizes == [2, 1]
    assert left_out.said() == "2 answers that had no room in the context window"
    # Neither is a matter of the prompt's length, though a full queue is a CapacityError, too.
    for kind in (NumericsError, QueueFullError):
        error[0] = kind("no")
        for work in (
            lambda: answer(decoder, asked, Sampling(max_tokens=4), seed=3),
            lambda: invent(decoder, range(2), [], Sampling(max_tokens=4), seed=3),
        ):
            with pytest.raises(kind, match="no"):
                work()


def test_an_engine_that_has_ended_is_no_prompt_without_room(tmp_path: Path) -> None:
    with templated(tmp_path / "target", TEMPLATE) as closed:
        pass
    with pytest.raises(CapacityError, match="closed"):
        answer(closed, [Asked(("def",), 0)], Sampling(max_tokens=4), seed=3)


def test_made_up_prompts_start_with_their_openers(decoder: DSparkDecoder) -> None:
    assert user_tags(decoder.models.require_tokenizer()) == ("[user] ", "<|endoftext|>\n[assistant] ")
    long = Sampling(temperatures=(1.0, 1.0), max_tokens=400)
    found = invent(decoder, range(6), ["import ", "def "], long, seed=1)
    assert all(one.turns[0].startswith(("import", "def")) for one in found)
    assert [one.turns for one in found] == [
        one.turns for one in invent(decoder, range(6), ["import ", "def "], long, seed=1)
    ]


def test_a_template_that_rewrites_turns_cannot_make_prompts_up(
    decoder: DSparkDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "chat_text", lambda *_: "something else")
    with pytest.raises(ConfigError, match="rewrites"):
        user_tags(decoder.models.require_tokenizer())
