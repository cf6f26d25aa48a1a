"""The gates before a long run, on the embedded pair: they pass, and they notice what they are for."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from commandline import link_target
from dspark import DSparkDecoder, SamplingParams
from dspark.errors import ConfigError
from dspark.pretrained import resolve
from dspark.text.looping import FEWEST_DISTINCT, distinct_share
from dspark.train import check
from dspark.train.forward import BlockOutputs, TrainingPass
from dspark.train.run import train
from dspark.train.teacher import States, Teacher
from training import STARTS, small_run, write_chats

TARGET, DRAFT = resolve("tiny", "target"), resolve("tiny-draft", "draft")


def gates(tmp_path: Path, decoders: Callable[..., DSparkDecoder]) -> dict[str, object]:
    tokenizer = decoders().models.require_tokenizer()
    settings = small_run(tmp_path, tmp_path)
    return check.gates(settings, TARGET, DRAFT, [tokenizer.encode(text) for text in STARTS[:3]])


def test_training_and_decoding_agree(tmp_path: Path, decoders: Callable[..., DSparkDecoder]) -> None:
    found = gates(tmp_path, decoders)
    assert found["passed"]
    assert found["drafted_accepted"]


def test_a_penalty_among_the_targets_defaults_is_no_fault(
    tmp_path: Path, decoders: Callable[..., DSparkDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "target"
    place.mkdir()
    link_target(place, without=("generation_config.json",))
    (place / "generation_config.json").write_text('{"repetition_penalty": 1.3}')
    monkeypatch.setattr(sys.modules[__name__], "TARGET", place)
    assert gates(tmp_path, decoders)["passed"]


def test_an_untrained_draft_proves_nothing(
    tmp_path: Path, decoders: Callable[..., DSparkDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", decoders(draft=None), count=4)
    untrained = {"learning_rate": 1e-12, "pace": {"steps": 1}, "data": {"held_out": 0.0}}
    train(small_run(tmp_path, chats, **untrained), print)
    monkeypatch.setattr(sys.modules[__name__], "DRAFT", tmp_path / "draft")
    found = gates(tmp_path, decoders)
    assert found["drafted_accepted"]  # it repeats its input
    assert not found["teacher_wrong"]
    assert not found["rounds_wrong"]
    assert (found["verdict"], found["passed"]) == ("inconclusive", False)


def test_equality_without_an_accepted_token_proves_nothing(
    tmp_path: Path, decoders: Callable[..., DSparkDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = check._one
    monkeypatch.setattr(check, "_one", lambda *given: one(*given) | {"drafted_accepted": 0})
    found = gates(tmp_path, decoders)
    assert found["noticed"]
    assert (found["verdict"], found["passed"]) == ("inconclusive", False)


def test_prompts_of_generated_conversations_are_used(
    tmp_path: Path, decoders: Callable[..., DSparkDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = small_run(
        tmp_path, tmp_path, start="tiny-draft", data={"files": (), "self_prompts": 8, "held_out": 0.0}
    )
    with pytest.raises(ConfigError, match="no conversation is left"):
        check.check(settings, print)
    place = tmp_path / "data" / "self-made"
    place.mkdir(parents=True)
    chats = write_chats(place / "chats.jsonl", decoders(draft=None), count=2)
    asked: list[list[int]] = []
    monkeypatch.setattr(check, "gates", lambda *given: asked.extend(given[3]) or {})
    monkeypatch.setattr(check, "overfit", lambda *given: {"overfit": 1.0})
    check.check(settings, print)
    lines = [json.loads(line) for line in chats.read_text().splitlines()]
    assert asked == [line["token_ids"][: line["answer_start"]] for line in lines]


def test_states_off_by_one_are_noticed(
    tmp_path: Path, decoders: Callable[..., DSparkDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    states = Teacher.states

    def wrong(self: Teacher, conversations: object) -> list[States]:
        return [
            States(one.taps, one.hidden.roll(1, 0), one.normalisers) for one in states(self, conversations)
        ]  # type: ignore[arg-type]

    monkeypatch.setattr(Teacher, "states", wrong)
    found = gates(tmp_path, decoders)
    assert not found["passed"]
    assert found["teacher_wrong"]


def test_a_context_that_includes_the_anchor_is_noticed(
    tmp_path: Path, decoders: Callable[..., DSparkDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = TrainingPass.forward

    def leaking(self: TrainingPass, batch: object, anchors: object, width: int, read: Any) -> list[Any]:
        shifted = type(batch)(
            **{n: getattr(batch, n) for n in batch.__slots__} | {"taps": batch.taps.roll(-1, 1)}
        )  # type: ignore[attr-defined]
        return forward(self, shifted, anchors, width, read)  # type: ignore[arg-type]

    monkeypatch.setattr(TrainingPass, "forward", leaking)
    found = gates(tmp_path, decoders)
    assert not found["passed"]
    assert found["rounds_wrong"]
    assert not found["teacher_wrong"]


def test_a_markov_token_off_by_one_is_noticed(
    tmp_path: Path, decoders: Callable[..., DSparkDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = TrainingPass._heads

    def shifted(self: TrainingPass, hidden: Tensor, labels: object) -> BlockOutputs:
        previous = labels.previous.roll(1, 1)  # type: ignore[attr-defined]
        wrong = type(labels)(labels.positions, previous, labels.tokens, labels.counted)  # type: ignore[attr-defined]
        return heads(self, hidden, wrong)  # type: ignore[arg-type]

    monkeypatch.setattr(TrainingPass, "_heads", shifted)
    assert not gates(tmp_path, decoders)["passed"]


def learned(tmp_path: Path, decoders: Callable[..., DSparkDecoder]) -> float:
    settings = small_run(tmp_path, tmp_path)
    prompt = decoders().models.require_tokenizer().encode("class Reader(")
    return check.overfit(settings, TARGET, DRAFT, prompt, print)["overfit"]


def test_what_is_learned_by_heart_is_drafted(
    tmp_path: Path, decoders: Callable[..., DSparkDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "OVERFIT_STEPS", 100)
    assert learned(tmp_path, decoders) >= check.OVERFIT
    assert not list(tmp_path.iterdir())


def test_a_lean_form_is_no_matter_of_the_copy_that_learns(
    tmp_path: Path, decoders: Callable[..., DSparkDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is stored as what fits its vocabulary, which may not do without its head."""
    monkeypatch.setattr(check, "OVERFIT_STEPS", 1)
    settings = small_run(tmp_path, tmp_path, packaging="nested", save_head=False)
    prompt = decoders().models.require_tokenizer().encode("class Reader(")
    assert 0.0 <= check.overfit(settings, TARGET, DRAFT, prompt, print)["overfit"] <= 1.0


def test_an_answer_to_learn_does_not_loop_and_is_drawn_again_with_a_draft(
    decoders: Callable[..., DSparkDecoder],
) -> None:
    plain, drafting = (decoders(draft=d, acceptance="coupled") for d in (None, "tiny-draft"))
    prompt = plain.models.require_tokenizer().encode("x = [" + "0, " * 12)
    greedy = plain.generate(prompt, SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True))
    assert distinct_share(greedy.token_ids) < FEWEST_DISTINCT
    params, answer = check._to_learn(plain, prompt)
    assert distinct_share(answer.token_ids) >= FEWEST_DISTINCT
    again = drafting.generate(prompt, params)
    assert again.token_ids == answer.token_ids
    assert any(one.accepted for one in again.rounds)


def test_labels_off_by_one_are_noticed(
    tmp_path: Path, decoders: Callable[..., DSparkDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = TrainingPass._heads

    def shifted(self: TrainingPass, hidden: Tensor, labels: Any) -> BlockOutputs:
        outputs = heads(self, hidden, labels)
        late = dataclasses.replace(
            labels, positions=labels.positions.roll(1, 1), tokens=labels.tokens.roll(1, 1)
        )
        return outputs._replace(labels=late)

    monkeypatch.setattr(TrainingPass, "_heads", shifted)
    monkeypatch.setattr(check, "OVERFIT_STEPS", 100)
    assert learned(tmp_path, decoders) < check.OVERFIT


def test_a_draft_that_does_not_learn_fails_the_check(
    tmp_path: Path, decoders: Callable[..., DSparkDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", decoders(draft=None), count=4)
    settings = small_run(tmp_path / "run", chats, start="tiny-draft")
    monkeypatch.setattr(check, "gates", lambda *given: {"verdict": "passed", "passed": True})
    for overfit, verdict in ((0.95, "passed"), (0.5, "failed")):
        monkeypatch.setattr(check, "overfit", lambda *given, share=overfit: {"overfit": share})
        found = check.check(settings, print)
        assert (found["verdict"], found["passed"]) == (verdict, verdict == "passed")


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("vocabulary", [None, 200])
def test_one_sample_overfits_to_the_whole_block(tmp_path: Path, vocabulary: int | None) -> None:
    params = SamplingParams(max_tokens=81, temperature=0.0, ignore_eos=True)
    with DSparkDecoder.from_pretrained("tiny", None, device="cpu") as decoder:
        text = decoder.generate("class Reader(", params)
    start, ids = len(text.prompt_token_ids), [*text.prompt_token_ids, *text.token_ids]
    chats = tmp_path / "one.jsonl"
    chats.write_text(json.dumps({"token_ids": ids, "answer_start": start}))
    settings = small_run(
        tmp_path / "run",
        chats,
        shape={"layers": 2, "vocabulary": vocabulary},
        data={"held_out": 0.0},
        pace={"steps": 400, "sequences": 1, "report_every": 50, "checkpoint_seconds": 1e9},
        anchors=80,
        save_dtype="float32",
    )
    train(settings, print)
    with DSparkDecoder.from_pretrained("tiny", tmp_path / "run" / "draft", device="cpu") as decoder:
        again = decoder.generate("class Reader(", params)
    assert again.token_ids == text.token_ids
    rounds = [one.committed for one in again.rounds]
    assert sum(rounds[:-1]) >= 4.8 * len(rounds[:-1]), rounds  # block size 4, and one
