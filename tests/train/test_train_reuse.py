"""What a run finds from an earlier one: used where it is its own, and whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark import DSparkDecoder, files
from dspark.draft.vocabulary import OFFSETS
from dspark.errors import CheckpointError, ConfigError
from dspark.pretrained import resolve
from dspark.target import load_target
from dspark.train import gather, prepare
from dspark.train.before import check_curve, check_first
from dspark.train.cache import StateCache, check_owner
from dspark.train.create import check_start
from dspark.train.data.conversations import Conversation
from dspark.train.data.shards import Shards
from dspark.train.identity import identity, named
from dspark.train.report import Log, reports
from dspark.train.run import train
from dspark.train.save import mend
from dspark.train.teacher import Teacher
from training import small_run, write_chats

TARGET, DRAFT = resolve("tiny", "target"), resolve("tiny-draft", "draft")
ONE = {"pace": {"steps": 1, "sequences": 1}, "data": {"held_out": 0.0}}


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory, decoders: Callable[..., DSparkDecoder]) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", decoders(draft=None), count=6)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, chats: Path) -> Path:
    output = tmp_path_factory.mktemp("finished") / "run"
    train(small_run(output, chats, **ONE), print)
    return output


def tuned(place: Path, by: float = 1e-3) -> None:
    """Fine-tunes a target's weights where they are."""
    file = place / "model.safetensors"
    save_file({n: w * (1 + by) for n, w in load_file(file).items()}, file, metadata={"format": "pt"})


def test_a_finished_run_leaves_its_draft_and_calibration_alone(
    tmp_path: Path, chats: Path, finished: Path
) -> None:
    output = tmp_path / "run"
    shutil.copytree(finished, output)
    draft = output / "draft"
    (draft / "calibration.json").write_text("fitted")
    (draft / "README.md").write_text("a card")
    was = (draft / "model.safetensors").stat().st_ino
    train(small_run(output, chats, **ONE), print)
    assert (draft / "model.safetensors").stat().st_ino == was
    assert {file.name for file in draft.iterdir()} >= {"calibration.json", "README.md"}
    for form in ({"packaging": "nested"}, {"packaging": "nested", "save_dtype": "float32"}):
        train(small_run(output, chats, **ONE, **form), print)
        assert (draft / "calibration.json").read_text() == "fitted"
    assert {one.dtype for one in load_file(draft / "model.safetensors").values()} == {torch.float32}
    more = {"pace": {"steps": 2, "sequences": 1}, "data": {"held_out": 0.0}}
    train(small_run(output, chats, packaging="nested", accept_changes=True, **more), print)
    assert not (draft / "calibration.json").exists()
    assert not list(output.glob("draft.*"))


def test_a_kill_between_the_renames_is_mended(tmp_path: Path, chats: Path, finished: Path) -> None:
    output = tmp_path / "run"
    shutil.copytree(finished, output)
    (output / "draft" / "calibration.json").write_text("fitted")
    (output / "draft").rename(output / "draft.old")
    train(small_run(output, chats, **ONE), print)
    assert (output / "draft" / "calibration.json").read_text() == "fitted"
    # With the new draft whole beside the old one, it is the new one.
    (output / "draft").rename(output / "draft.old")
    shutil.copytree(finished / "draft", output / "draft.new")
    (output / "draft.new" / "which").write_text("new")
    mend(output / "draft")
    assert sorted(one.name for one in output.glob("draft*")) == ["draft"]
    assert (output / "draft" / "which").exists()
    # Half a first draft is none.
    shutil.rmtree(output / "draft")
    (output / "draft.new").mkdir()
    mend(output / "draft")
    assert not (output / "draft").exists()


def test_a_target_is_told_by_its_contents(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    shutil.copytree(TARGET, here)
    shutil.copytree(TARGET, there)
    assert identity(here) == identity(there) == identity(TARGET)
    tuned(here)
    assert identity(here) != identity(there)
    tensors = load_file(there / "model.safetensors")
    tensors["model.layers.2.mlp.down_proj.weight"] *= 1.01  # one matrix alone
    save_file(tensors, there / "model.safetensors", metadata={"format": "pt"})
    assert identity(there) not in (identity(here), identity(TARGET))
    (here / "config.json").unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        identity(here)


def test_nothing_of_other_weights_at_the_same_path_is_reused(
    tmp_path: Path, chats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, elsewhere = tmp_path / "target", tmp_path / "elsewhere"
    shutil.copytree(TARGET, target)
    shutil.copytree(TARGET, elsewhere)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "def "}\n')
    monkeypatch.setattr(gather, "answer", lambda *_: [Conversation(np.arange(9), ((2, 9),))])
    data = {"prompts": prompts, "cache": tmp_path / "states", "held_out": 0.0}

    def run(target: Path) -> None:
        settings = small_run(
            tmp_path / "run",
            chats,
            target=str(target),
            data=data,
            pace=ONE["pace"],
            shape={"mask_token_id": 0},
        )
        train(settings, print)

    run(target)
    run(elsewhere)  # the same target
    tuned(target)
    with pytest.raises(ConfigError, match=r"the run there has the target .*target.* contents"):
        run(target)
    (tmp_path / "run" / "state.pt").unlink()
    with pytest.raises(CheckpointError, match=r"states there are for .*name another cache"):
        run(target)
    shutil.rmtree(tmp_path / "states")
    with pytest.raises(CheckpointError, match=r"was generated with the target .* contents"):
        run(target)


def test_records_without_contents_are_compared_by_name(tmp_path: Path) -> None:
    settings = small_run(tmp_path / "run", tmp_path)
    old = settings.curve("") | {"target": "tiny"}
    del old["target_content"]
    check_curve(settings, {"run": {"curve": old}}, identity(TARGET))
    with pytest.raises(ConfigError, match="target 'other', but 'tiny'"):
        check_curve(settings, {"run": {"curve": old | {"target": "other"}}}, identity(TARGET))
    (tmp_path / "index.json").write_text('{"target": "tiny", "taps": [0]}')
    check_owner(tmp_path, named("tiny", identity(TARGET)))
    with pytest.raises(CheckpointError, match="another cache"):
        check_owner(tmp_path, named("other", identity(TARGET)))


@pytest.mark.parametrize("damage", [lambda content: content[:100], lambda content: b""], ids=["cut", "empty"])
def test_a_damaged_shard_of_states_is_computed_again(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    talk = Conversation(np.arange(10, 20), ((2, 10),))
    teacher, lines = Teacher(load_target(TARGET), (0,)), []
    StateCache(tmp_path, {}, print).fill([talk], teacher, lambda done, total: None)
    (file,) = tmp_path.glob("states-*")
    file.write_bytes(damage(file.read_bytes()))
    cache = StateCache(tmp_path, {}, lines.append)
    assert len(lines) == 1
    assert f"{file}: cannot be read" in lines[0]
    assert cache.missing([talk]) == [talk]
    cache.fill([talk], teacher, lambda done, total: None)
    assert not StateCache(tmp_path, {}, pytest.fail).missing([talk])


@pytest.mark.parametrize("damage", [None, '{"seed": 0', "[]"], ids=["missing", "cut", "no object"])
def test_files_whose_record_cannot_be_read_are_not_taken(tmp_path: Path, damage: str | None) -> None:
    talk = Conversation(np.arange(10, 20), ((2, 10),))
    Shards(tmp_path, {"seed": 0}).fill([0], lambda _: [talk], lambda _: None)
    teacher = Teacher(load_target(TARGET), (0,))
    StateCache(tmp_path, {"seed": 0}, print).fill([talk], teacher, lambda done, total: None)
    for name in ("generation.json", "index.json"):
        (tmp_path / name).unlink() if damage is None else (tmp_path / name).write_text(damage)
    cure = "put it back, empty the directory, or name another one"
    with pytest.raises(CheckpointError, match=rf"generation\.json: cannot be read .* answers .*{cure}"):
        Shards(tmp_path, {"seed": 0})
    with pytest.raises(CheckpointError, match=rf"index\.json: cannot be read .* hidden states .*{cure}"):
        StateCache(tmp_path, {"seed": 0}, print)


def test_a_record_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, seen = tmp_path / "generation.json", list[tuple[str, str]]()
    file.write_text("old")
    monkeypatch.setattr(files, "sync", lambda path: seen.append((path.read_text(), file.read_text())))
    files.write_whole(file, "new")
    assert seen == [("new", "old")]
    assert file.read_text() == "new"


def test_cut_lines_of_a_log_are_passed_over(tmp_path: Path) -> None:
    whole, cut = '{"step": 1, "held_out": {"1": {}}}', '{"step": 2, "held_out": {"1": {}'
    (tmp_path / "log.jsonl").write_text(f"{whole}\n{cut}\n7\n" + '{"step": 3, "held_out": {"1": {}}')
    assert [one["step"] for one in reports(tmp_path)] == [1]
    log = Log(tmp_path, 5, False)
    log.write(6, {"loss": 1.0})
    log.close()
    assert [one["step"] for one in reports(tmp_path)] == [1, 6]


def changed(place: Path, name: str, by: float) -> Path:
    shutil.copytree(DRAFT, place)
    tensors = load_file(place / "model.safetensors")
    tensors[name] = tensors[name] * (1 + by)
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    return place


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_a_draft_with_another_target_s_embeddings_or_head_is_no_start(tmp_path: Path, name: str) -> None:
    check_start(changed(tmp_path / "rounded", name, 2**-9), TARGET)
    other = changed(tmp_path / "other", name, 0.1)
    with pytest.raises(ConfigError, match=f"its {name} is not the target's"):
        check_start(other, TARGET)
    with pytest.raises(ConfigError, match=f"its {name} is not the target's"):
        check_first(small_run(tmp_path / "run", tmp_path, start=str(other)), TARGET, None, 1, None)


def test_a_draft_that_permutes_the_whole_vocabulary_is_no_start(tmp_path: Path) -> None:
    place = changed(tmp_path / "draft", "norm.weight", 0.0)
    tensors = load_file(place / "model.safetensors")
    tensors[OFFSETS] = torch.zeros(512, dtype=torch.int64)
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    assert check_start(place, TARGET) is None
    tensors[OFFSETS][:2] = torch.tensor([1, -1])
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="does not ascend"):
        check_start(place, TARGET)


def test_unfit_targets_and_bad_data_are_found_before_generation(
    tmp_path: Path, chats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def generate(*_: object) -> None:
        raise AssertionError("generated something")

    monkeypatch.setattr(prepare, "generate", generate)
    prompts, bad = tmp_path / "prompts.jsonl", tmp_path / "bad.jsonl"
    prompts.write_text('{"turns": ["a"]}\n')
    bad.write_text('{"token_ids": [9999, 1, 2], "answer_start": 1}')
    data = {"prompts": prompts}
    for work in (train, prepare.generate_only):
        with pytest.raises(AssertionError, match="generated something"):
            work(small_run(tmp_path / "run", chats, data=data), print)
        with pytest.raises(CheckpointError, match="token 9999"):
            work(small_run(tmp_path / "run", bad, data=data), print)
        with pytest.raises(ConfigError, match="packaging"):
            work(small_run(tmp_path / "run", chats, data=data, packaging="odd"), print)
        with pytest.raises(ConfigError, match="cannot make up prompts"):
            work(small_run(tmp_path / "run", chats, data={"self_prompts": 8}), print)
    prompts.write_text('{"turns": ["a", "b"]}\n')
    with pytest.raises(ConfigError, match="prompts of several turns"):
        prepare.generate_only(small_run(tmp_path / "run", chats, data=data), print)
    prompts.write_text('{"turns": ["a"]}\n')
    forward = type(load_target(TARGET)).forward

    def scaled(self: object, *given: object) -> object:
        logits, taps = forward(self, *given)  # type: ignore[arg-type]
        return (logits if "hidden" in given else logits * 0.5), taps

    monkeypatch.setattr(type(load_target(TARGET)), "forward", scaled)
    for work in (train, prepare.generate_only):
        with pytest.raises(ConfigError, match="no draft can be trained"):
            work(small_run(tmp_path / "run", chats, data=data), print)


def test_conversations_end_at_the_target_s_window(tmp_path: Path, chats: Path) -> None:
    settings = small_run(tmp_path / "run", chats, data={"held_out": 0.0, "max_length": 10**6})
    lines: list[str] = []
    sizes = load_target(TARGET).config
    gather.gather(settings, [], None, sizes, lines.append)
    assert f"cut to the target's window of {sizes.max_position_embeddings:,} tokens" in lines[0]
    long = tmp_path / "long.jsonl"
    ids = np.random.default_rng(0).integers(0, 500, sizes.max_position_embeddings + 9).tolist()
    long.write_text(json.dumps({"token_ids": ids, "answer_start": 1}))
    settings = small_run(tmp_path / "run", long, data={"held_out": 0.0, "max_length": 10**6})
    ((one,), _) = gather.gather(settings, [], None, sizes, print)
    assert len(one.tokens) == sizes.max_position_embeddings


def test_answers_made_with_a_draft_know_it_by_its_contents(tmp_path: Path) -> None:
    """Where its blocks failed is kept with them, and another draft fails elsewhere."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    drafts = [tmp_path / name for name in ("draft", "moved")]
    for path in drafts:
        shutil.copytree(DRAFT, path)

    def shards(draft: Path) -> Path:
        data = {"files": (), "prompts": prompts, "draft": str(draft)}
        found = gather._shards(small_run(tmp_path / "run", tmp_path, data=data))["prompts"]
        found.fill([0], lambda _: [conversation], lambda _: None)
        return found.file(0)

    conversation = Conversation(np.arange(5), ((2, 5),))
    assert shards(drafts[0]) == shards(drafts[1])
    tuned(drafts[0])
    with pytest.raises(CheckpointError, match="the data there was generated with draft"):
        shards(drafts[0])


def test_a_cache_gives_back_the_teachers_states(tmp_path: Path) -> None:
    teacher = Teacher(load_target(TARGET), (0, 2, 4))
    some = [Conversation(np.arange(i, i + 9 + i), ((4, 9 + i),)) for i in range(3)]
    StateCache(tmp_path, {"of": "these"}, print).fill(some, teacher, lambda *_: None)
    found = StateCache(tmp_path, {"of": "these"}, print).states(some[::-1])[::-1]
    for one, wanted in zip(found, teacher.states(some), strict=True):
        for name in ("taps", "hidden", "normalisers"):
            stored = getattr(one, name)
            assert torch.equal(stored, getattr(wanted, name).to(stored.dtype)), name
            assert stored.abs().max() > 0
