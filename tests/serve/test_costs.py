"""Cost tables: measured at the start, kept on disk, and never a reason to fail."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from dspark import DSparkDecoder, SamplingParams
from dspark.core import CostTable
from dspark.errors import CheckpointError
from dspark.kernels import Choice
from dspark.pretrained import cache_root
from dspark.serve.costs import AT_START, THOROUGH, Costs, measure, obtain
from dspark.serve.costs.cache import cost_file, cost_key, load, store
from dspark.serve.costs.device import named_in
from dspark.serve.models import Models
from dspark.serve.options import Options
from dspark.serve.runner import Runner
from random_pair import write_draft, write_target

COSTS = Costs(
    passes=((1, 1, 0.010), (2, 1, 0.011), (8, 1, 0.020), (4, 4, 0.016), (8, 4, 0.026)),
    draft=((1, 0.002), (4, 0.005)),
    token_seconds=0.0001,
    widest=256,
    context=64,
    repeats=3,
    seconds=0.5,
)


@pytest.fixture(scope="module")
def models() -> Models:
    return Models.load("tiny", "tiny-draft", device="cpu")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
    yield tmp_path / "cache" / "costs"


def measured(models: Models, **options: Any) -> Costs:
    how = {"block_size": models.gamma, "max_batch_size": 4, "candidates": None, "effort": AT_START}
    return measure(models, **{**how, **options})  # type: ignore[arg-type]


def test_passes_are_measured_up_to_the_widest(models: Models) -> None:
    costs = measured(models)
    assert [(tokens, requests) for tokens, requests, _ in costs.passes] == [
        *((tokens, 1) for tokens in (1, 2, 4, 8, 16, 32)),
        *((tokens, 4) for tokens in (4, 8, 16)),
    ]
    assert [requests for requests, _ in costs.draft] == [1, 4]
    assert costs.widest == 4 * 8 and costs.context == 64 and 0 < costs.seconds < 60
    assert all(seconds > 0 for *_, seconds in costs.passes) and costs.token_seconds > 0


def test_a_widest_pass_that_is_no_power_of_two_is_measured_too(models: Models) -> None:
    costs = measured(models, block_size=4, max_batch_size=1)
    assert [(tokens, requests) for tokens, requests, _ in costs.passes] == [(1, 1), (2, 1), (4, 1), (5, 1)]
    assert len(costs.draft) == 1


def test_a_measurement_that_is_out_of_time_ends_with_what_it_has(models: Models) -> None:
    costs = measured(models, effort=replace(AT_START, seconds=0.0))
    assert [(tokens, requests) for tokens, requests, _ in costs.passes] == [(1, 1), (8, 1), (32, 1)]
    assert len(costs.draft) == 1 and costs.table().seconds(1) > 0


def test_a_window_of_a_few_positions(tmp_path: Path) -> None:
    """Nothing is run beyond it, and requests leave nothing behind."""
    target, draft = write_target(tmp_path / "target", 7), write_draft(tmp_path / "draft", 7, confidence=False)
    pair = Models.load(target, draft, device="cpu")
    costs = measured(pair, block_size=4, max_batch_size=32)
    assert costs.context == pair.window // 2 == 32
    assert max(tokens for tokens, requests, _ in costs.passes if requests == 1) == 32


def test_models_on_another_device(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """What the core cannot read in place is copied to it, when costs are measured as in every round."""
    for name in ("prefill", "draft", "verify"):
        whole = getattr(Runner, name)

        def elsewhere(*args: Any, whole: Any = whole) -> Any:
            found = whole(*args)
            return found.as_subclass(Elsewhere) if isinstance(found, Tensor) else tuple(map(_moved, found))

        monkeypatch.setattr(Runner, name, elsewhere)
    params = SamplingParams(max_tokens=24, temperature=0.0)
    with DSparkDecoder.from_pretrained("tiny", "tiny-draft", device="cpu", max_batch_size=2) as decoder:
        assert decoder.info()["cost_table"].startswith("measured at start in ")
        result = decoder.generate("import os\n", params)
    with DSparkDecoder.from_pretrained("tiny", device="cpu") as plain:
        assert plain.generate("import os\n", params).token_ids == result.token_ids
    assert Elsewhere.copies > 0


class Elsewhere(Tensor):
    """A tensor that must be copied to be read."""

    is_cpu = False
    copies = 0

    def cpu(self, *_: Any, **__: Any) -> Tensor:
        Elsewhere.copies += 1
        return self.as_subclass(Tensor)


def _moved(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.as_subclass(Elsewhere)


def test_the_table_rises_with_tokens_and_requests() -> None:
    table = COSTS.table()
    assert isinstance(table, CostTable)
    seconds = [table.seconds(tokens) for tokens in range(1, 300)]
    assert seconds == sorted(seconds)


def test_costs_survive_the_disk(cache: Path, models: Models) -> None:
    key = cost_key(models, 7, None)
    path = store(key, COSTS)
    assert path == cost_file(key) and path is not None and path.parent == cache
    assert load(key) == COSTS
    assert [file.name for file in cache.iterdir()] == [path.name]


def test_the_key_tells_apart_what_costs_differently(models: Models) -> None:
    key = cost_key(models, 7, None)
    others = [
        cost_key(models, 6, None),
        cost_key(models, 7, 64),
        cost_key(replace(models, draft=None, paths=(models.paths[0], None)), 7, None),
        cost_key(replace(models, paths=(models.paths[1], models.paths[1])), 7, None),
    ]
    assert len({cost_file(each) for each in [key, *others]}) == 5
    assert cost_key(models, 7, None) == key
    assert key["threads"] == 1 and key["device"] and key["torch"] and key["dspark"]


def test_the_key_tells_apart_how_passes_run(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [cost_key(models, 7, None)]
    monkeypatch.setattr(
        "dspark.serve.costs.cache.parallel_region", lambda: not keys[0]["attention_has_threads"]
    )
    keys.append(cost_key(models, 7, None))
    monkeypatch.setattr(type(models.target), "runs_through", "transformers 9", raising=False)
    keys.append(cost_key(models, 7, None))
    assert len({cost_file(each) for each in keys}) == 3


def test_the_key_tells_apart_what_kernels_do(models: Models) -> None:
    """A table that was timed with kernels is not for a process without them, and the other way round."""

    def key(**roles: str) -> Path:
        return cost_file(cost_key(replace(models, roles={**models.roles, **roles}), 7, None))

    without = cost_file(cost_key(models, 7, None))
    kernels = [
        key(attention="kernel: float32 heads of 64"),
        key(attention="kernel: float32 heads of 64 and 128"),
        key(**{"draft attention": "kernel: float32 heads of 64"}),
        key(sampling='kernel; core for the rule "block"'),
    ]
    assert len({without, *kernels}) == 5
    # Why there are none makes no difference to a round.
    assert without == key(attention="torch: DSPARK_KERNELS is off", sampling="core: DSPARK_KERNELS is off")


def test_the_key_names_what_kernels_are_compiled_for(models: Models) -> None:
    class Kernels:
        architecture, nvrtc = "sm_90", "12.8"

    faked = replace(
        models,
        roles={"attention": "kernel: float32 heads of 64"},
        kernels=Choice(Kernels()),  # type: ignore[arg-type]
    )
    assert cost_key(faked, 7, None)["kernels"] == {
        "attention": "kernel: float32 heads of 64",
        "compiled for": "sm_90 by NVRTC 12.8",
    }


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        ("processor : 0\nmodel name : A Chip @ 2 GHz\n\nmodel name : A Chip @ 2 GHz\n", "A Chip @ 2 GHz"),
        ("cpu : POWER9, altivec\n", "POWER9, altivec"),
        (
            "CPU implementer : 0x41\nCPU part : 0xd0c\n\nCPU implementer : 0x41\nCPU part : 0xd05\n",
            "CPU implementer 0x41, CPU part 0xd0c, CPU part 0xd05",
        ),
        ("processor : 0\n", ""),
    ],
)
def test_a_cpu_is_named_whatever_its_kind(cpuinfo: str, name: str) -> None:
    assert named_in(cpuinfo) == name


def test_a_hurried_measurement_does_not_replace_a_thorough_one(cache: Path, models: Models) -> None:
    key = cost_key(models, 7, None)
    thorough = replace(COSTS, widest=8, repeats=THOROUGH.repeats)
    path = store(key, thorough)
    wider = obtain(models, Options(max_batch_size=2))
    assert wider is not None and wider.source.startswith("measured at start in ")
    assert f"{path} is for fewer requests at once" in wider.source and load(key) == thorough
    narrow = obtain(models, Options(max_batch_size=1))
    assert narrow is not None and narrow.source == f"from cache {path}"
    store(key, replace(thorough, repeats=AT_START.repeats))
    again = obtain(models, Options(max_batch_size=2))
    hurried = load(key)
    assert again is not None and again.source.startswith("measured") and hurried is not None
    assert hurried.widest == 16


def test_the_same_model_elsewhere_has_the_same_key(models: Models, tmp_path: Path) -> None:
    for file in models.paths[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    moved = replace(models, paths=(tmp_path, models.paths[1]))
    assert cost_key(moved, 7, None) == cost_key(models, 7, None)
    config = tmp_path / "config.json"
    config.write_text(config.read_text() + " ")
    assert cost_key(moved, 7, None) != cost_key(models, 7, None)


DAMAGED = {
    "empty": "",
    "half": '{"key": {"format": 1',
    "a list": "[]",
    "another key": json.dumps({"key": {"format": 0}, "costs": COSTS.to_json()}),
    "without costs": None,
    "no pass": {"passes": []},
    "negative": {"draft": [[1, -0.1]]},
    "infinite": {"token_seconds": 1e999},
    "no number": {"passes": [[1, 1, "fast"]]},
    "zero tokens": {"passes": [[0, 1, 0.1]]},
    "a pass in no time": {"passes": [[1, 1, 0.0]]},
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_measured_again_with_one_warning(
    name: str, cache: Path, models: Models, caplog: pytest.LogCaptureFixture
) -> None:
    key, change = cost_key(models, 7, None), DAMAGED[name]
    path = cost_file(key)
    path.parent.mkdir(parents=True)
    if isinstance(change, str):
        path.write_text(change)
    else:
        costs = {} if change is None else {**COSTS.to_json(), **change}
        path.write_text(json.dumps({"key": key, "costs": costs}))
    with caplog.at_level(logging.WARNING, "dspark"):
        found = obtain(models, Options(max_batch_size=1))
        assert found is not None and found.source.startswith("measured at start in ")
        assert len(caplog.records) == 1 and str(path) in caplog.text
        again = obtain(models, Options(max_batch_size=1))
    assert again is not None and again.source == f"from cache {path}" and len(caplog.records) == 1


def test_a_directory_in_the_place_of_the_file_is_no_error(
    cache: Path, models: Models, caplog: pytest.LogCaptureFixture
) -> None:
    path = cost_file(cost_key(models, 7, None))
    (path / "something").mkdir(parents=True)
    found = obtain(models, Options(max_batch_size=1))
    assert found is not None and found.source.startswith("measured")
    assert [file.name for file in cache.iterdir()] == [path.name], "no scratch file is left"


def test_a_cache_that_cannot_be_written_is_no_error(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "file" / "below"))
    with caplog.at_level(logging.WARNING, "dspark"):
        found = obtain(models, Options(max_batch_size=1))
    assert found is not None and found.source.startswith("measured") and not caplog.records


def test_no_place_for_a_cache_is_no_error(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("DSPARK_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(CheckpointError, match="set DSPARK_CACHE to a directory"):
        cache_root()
    found = obtain(models, Options(max_batch_size=1))
    assert found is not None and found.source.startswith("measured")


def test_a_cache_of_nobody_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_CACHE", "~no-such-user-of-ours/cache")
    with DSparkDecoder.from_pretrained("tiny", "tiny-draft", device="cpu", max_batch_size=1) as decoder:
        assert decoder.info()["cost_table"].startswith("measured at start in ")


def test_nothing_is_measured_where_nothing_is_planned(
    cache: Path, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr("dspark.serve.costs.source.measure", never)
    table = CostTable([(1, 0.01)])
    given = obtain(models, Options(cost_table=table))
    assert given is not None and given.table is table and given.source == "given"
    assert obtain(models, Options(policy="fixed")) is None
    assert obtain(replace(models, draft=None), Options()) is None
    assert obtain(replace(models, draft=None), Options(cost_table=table)) is None
    assert not cache.exists()


def test_a_decoder_measures_by_default_and_says_so(cache: Path) -> None:
    prompt, params = "import os\n", SamplingParams(max_tokens=24, temperature=0.0)
    with DSparkDecoder.from_pretrained("tiny", "tiny-draft", device="cpu", max_batch_size=2) as decoder:
        info = decoder.info()
        assert info["policy"] == "throughput" and info["cost_table"].startswith("measured at start in ")
        text = decoder.generate(prompt, params).token_ids
    with DSparkDecoder.from_pretrained("tiny", "tiny-draft", device="cpu", max_batch_size=2) as decoder:
        assert decoder.info()["cost_table"].startswith(f"from cache {cache}")
        assert decoder.generate(prompt, params).token_ids == text
    with DSparkDecoder.from_pretrained("tiny", device="cpu") as plain:
        assert plain.info()["cost_table"] is None and plain.info()["policy"] == "none: no draft"
        assert plain.generate(prompt, params).token_ids == text


def test_a_draft_without_a_confidence_head_runs_under_throughput(tmp_path: Path) -> None:
    target, draft = write_target(tmp_path / "target", 7), write_draft(tmp_path / "draft", 7, confidence=False)
    params = SamplingParams(max_tokens=20, temperature=0.0)
    with (
        DSparkDecoder.from_pretrained(target, draft) as decoder,
        DSparkDecoder.from_pretrained(target) as plain,
    ):
        assert decoder.generate([1], params).token_ids == plain.generate([1], params).token_ids
