"""Damaged checkpoints: a `CheckpointError` or `ConfigError`, or the same model as before; nothing else."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dspark.checkpoint import inspect_checkpoint
from dspark.checkpoint.header import read_header
from dspark.draft import DSparkDraftModel, load_draft
from dspark.errors import CheckpointError, ConfigError
from dspark.target import load_target
from model_zoo import (
    draft_tensors,
    flat_config,
    nested_config,
    target_config,
    target_tensors,
    write_checkpoint,
    write_target,
)
from packaging_zoo import dflash_config, reduced, speculators_config
from plain_draft import WINDOW, YARN, taps_of

REFUSED = (CheckpointError, ConfigError)
QUICK = settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
DRAFTS: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
    "flat": (flat_config(rope_parameters=YARN), draft_tensors(own=True)),
    "nested": (nested_config(**WINDOW), draft_tensors(own=False)),
    "speculators": (
        speculators_config(draft_vocab_size=16, **WINDOW, sliding_window_non_causal=True),
        reduced(draft_tensors(own=True)),
    ),
    "dflash": (dflash_config(), draft_tensors(own=False, kind=None, confidence=None)),
}
IGNORED = ("model_type", "num_anchors", "speculators_config", "verifier", "algorithm", "name_or_path")
"""Keys that nothing here reads."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_target(write_target(tmp_path_factory.mktemp("target"), "qwen3"))


def outcome(draft: DSparkDraftModel) -> tuple[Tensor, ...]:
    context = draft.new_context()
    with torch.inference_mode():
        draft.extend([(context, 20)], taps_of(20))
        return draft.block([9], [context])


NUMBERS = st.sampled_from(
    [0, 1, -1, 2, 3, 7, 31, 2**31, 2**63, 10**400, 0.5, -1.5, 1e300, float("nan"), float("inf")]
)
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    NUMBERS,
    st.sampled_from(["", "5", "true", "full_attention", "yarn", "x" * 300]),
    st.lists(st.one_of(NUMBERS, st.none(), st.just("sliding_attention")), max_size=6),
    st.dictionaries(
        st.sampled_from(["rope_type", "markov_rank", "a"]), st.one_of(NUMBERS, st.text(max_size=3))
    ),
)


def places(config: dict[str, Any], at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every value, nested ones too."""
    for key, value in config.items():
        yield (*at, key)
        if isinstance(value, dict):
            yield from places(value, (*at, key))


def put(config: dict[str, Any], place: tuple[str, ...], value: Any) -> Any:
    """Replaces a value of `config`; returns what was there."""
    for key in place[:-1]:
        config = config[key]
    before, config[place[-1]] = config[place[-1]], value
    return before


def wrong_kind(before: Any, after: Any) -> bool:
    """Whether no reader may take `after` for a value like `before`. Null is absent."""
    if after is None:
        return False
    number = (int, float)
    if isinstance(before, bool) or isinstance(after, bool):
        return isinstance(before, bool) != isinstance(after, bool)
    if isinstance(before, number) and isinstance(after, number):
        return isinstance(before, int) and not isinstance(after, int)
    return type(before) is not type(after)


@pytest.mark.parametrize("packaging", DRAFTS)
def test_mutated_configs(packaging: str, target: Any, tmp_path: Path) -> None:
    """One value replaced: refused if of another kind than it was; else refused, or a model that runs."""
    config, tensors = DRAFTS[packaging]
    path = write_checkpoint(tmp_path, config, tensors)
    paths = sorted(places(config))
    refused = loaded = 0

    @QUICK
    @given(place=st.sampled_from(paths), value=JUNK)
    def check(place: tuple[str, ...], value: Any) -> None:
        nonlocal refused, loaded
        mutated = copy.deepcopy(config)
        before = put(mutated, place, value)
        (path / "config.json").write_text(json.dumps(mutated))
        try:
            draft = load_draft(path, target=target)
        except REFUSED as error:
            refused += 1
            assert str(path) in str(error) or isinstance(error, ConfigError)
            assert len(str(error)) < 2000
            return
        loaded += 1
        unread = any(key in IGNORED for key in place)
        assert unread or not wrong_kind(before, value), f"{'.'.join(place)} = {value!r} was accepted"
        if draft.config.target_layer_ids == (0, 1, 2):
            hidden, base = outcome(draft)
            rows = draft.config.gamma
            assert hidden.shape[0] == draft.config.state_rows and base.shape[0] == rows
            assert base.isfinite().all(), f"{'.'.join(place)} = {value!r} gives logits that are not finite"

    check()
    assert refused > 30 and loaded > 3


@pytest.mark.parametrize("packaging", DRAFTS)
def test_missing_keys(packaging: str, target: Any, tmp_path: Path) -> None:
    """Every key left out in turn: refused, or what its absence means, never an accident."""
    config, tensors = DRAFTS[packaging]
    for place in sorted(places(config)):
        mutated = copy.deepcopy(config)
        inner = mutated
        for key in place[:-1]:
            inner = inner[key]
        del inner[place[-1]]
        path = write_checkpoint(tmp_path, mutated, tensors)
        try:
            draft = load_draft(path, target=target)
        except REFUSED:
            continue
        assert outcome(draft)[1].isfinite().all()


@pytest.mark.parametrize(
    "content", ["[" * 100_000, '{"a":' * 100_000, "1" * 10_000, "\x00", "nul", '{"a": 1,}', ""]
)
def test_configs_that_are_no_json(content: str, target: Any, tmp_path: Path) -> None:
    config, tensors = DRAFTS["nested"]
    path = write_checkpoint(tmp_path, config, tensors)
    (path / "config.json").write_text(content)
    with pytest.raises(
        CheckpointError, match=r"config.json: (cannot be read as JSON|expected a JSON object)"
    ):
        load_draft(path, target=target)


def test_the_config_may_be_anything_but_a_file(target: Any, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, *DRAFTS["nested"])
    (path / "config.json").unlink()
    (path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"config.json: cannot be read"):
        load_draft(path, target=target)


def same_or_refused(path: Path, target: Any, expected: tuple[Tensor, ...]) -> bool:
    """Loads what may be damaged: False if refused; what loads must be the same, or be seen to lack
    something."""
    try:
        draft = load_draft(path, target=target)
    except REFUSED:
        return False
    found = outcome(draft)
    same = all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    known = {"t2d"}
    assert same or set(inspect_checkpoint(path)["unused_tensors"]) - known, (
        "another model, and nothing says so"
    )
    return True


@pytest.mark.parametrize("packaging", DRAFTS)
def test_damaged_weights(packaging: str, target: Any, tmp_path: Path) -> None:
    """Bytes of the header changed, the file cut or lengthened, the header's length changed."""
    path = write_checkpoint(tmp_path, *DRAFTS[packaging])
    file = path / "model.safetensors"
    whole = file.read_bytes()
    header = int.from_bytes(whole[:8], "little")
    expected = outcome(load_draft(path, target=target))
    counts = {True: 0, False: 0}

    damage = st.one_of(
        st.tuples(st.just("flip"), st.integers(8, 8 + header - 1), st.integers(1, 255)),
        st.tuples(st.just("cut"), st.integers(0, len(whole) - 1), st.just(0)),
        st.tuples(st.just("more"), st.integers(1, 5000), st.just(0)),
        st.tuples(st.just("length"), st.integers(0, 2**64 - 1), st.just(0)),
        st.tuples(st.just("length"), st.integers(max(0, header - 40), header + 40), st.just(0)),
    )

    @QUICK
    @given(damage=damage)
    def check(damage: tuple[str, int, int]) -> None:
        kind, where, what = damage
        content = bytearray(whole)
        if kind == "flip":
            content[where] ^= what
        elif kind == "cut":
            del content[where:]
        elif kind == "more":
            content += b"\0" * where
        else:
            content[:8] = where.to_bytes(8, "little")
        file.write_bytes(content)
        loads = same_or_refused(path, target, expected)
        counts[loads] += 1
        assert not (loads and kind in ("cut", "more")), kind
        if kind == "length":
            assert loads == (where == header)

    check()
    assert counts[False] > 50


def swapped(header: dict[str, Any]) -> None:
    one, other = (header[name] for name in ("layers.0.mlp.up_proj.weight", "layers.0.mlp.gate_proj.weight"))
    one["data_offsets"] = other["data_offsets"]


def entry(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header["layers.1.mlp.down_proj.weight"].update(changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (swapped, "begins at byte"),
        (entry(data_offsets=[0, 10**30]), "malformed"),
        (entry(data_offsets=[10, 5]), "damaged"),
        (entry(data_offsets=[0.0, 8.0]), "malformed"),
        (entry(data_offsets=[True, False]), "malformed"),
        (entry(data_offsets=[0]), "malformed"),
        (entry(data_offsets="0"), "malformed"),
        (entry(shape=[-32, -40]), "malformed"),
        (entry(shape=[2**62, 2**62]), "damaged"),
        (entry(shape=[40, 32]), "wrong shape"),
        (entry(shape=None), "malformed"),
        (entry(dtype="F32"), "10240 bytes, but its dtype F32"),
        (entry(dtype="I64"), "dtype I64, expected F64"),
        (entry(dtype="Q7"), "dtype Q7, expected F64"),
        (entry(dtype=7), "malformed"),
        (lambda header: header.update({"norm.weight": 3}), "malformed"),
        (lambda header: header.update({"norm.weight": None}), "malformed"),
    ],
)
def test_headers_that_lie(
    change: Callable[[dict[str, Any]], None], message: str, target: Any, tmp_path: Path
) -> None:
    path = write_checkpoint(tmp_path, *DRAFTS["nested"])
    file = path / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    with pytest.raises(CheckpointError, match=message):
        load_draft(path, target=target)


def test_a_name_that_occurs_twice(tmp_path: Path) -> None:
    entry = '"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    text = f"{{{entry},{entry}}}".encode()
    file = tmp_path / "x.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"\0")
    with pytest.raises(CheckpointError, match="twice"):
        read_header(file)


@pytest.mark.parametrize("text", ["[]", "null", "3", "[" * 50_000, '{"a":' * 50_000, "\udcff", "{"])
def test_headers_that_are_no_object(text: str, tmp_path: Path) -> None:
    content = text.encode("utf-8", "surrogateescape")
    file = tmp_path / "x.safetensors"
    file.write_bytes(len(content).to_bytes(8, "little") + content)
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        read_header(file)


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"norm.weight": "../model.safetensors"}, "not in the same directory"),
        ({"norm.weight": "/etc/passwd"}, "not in the same directory"),
        ({"norm.weight": "."}, "not in the same directory|safetensors"),
        ({"norm.weight": 7}, "not an index"),
        ({"norm.weight": None}, "not an index"),
        ([], "not an index"),
        ({}, "missing"),
    ],
)
def test_indexes_that_lie(places: Any, message: str, target: Any, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, *DRAFTS["nested"])
    (path / "model.safetensors").rename(path / "shard.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(CheckpointError, match=message):
        load_draft(path, target=target)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_mutated_targets(family: str, tmp_path: Path) -> None:
    config = target_config(family)
    path = write_checkpoint(tmp_path, config, target_tensors(config))
    refused = 0

    @settings(QUICK, max_examples=60)
    @given(place=st.sampled_from(sorted(places(config))), value=JUNK)
    def check(place: tuple[str, ...], value: Any) -> None:
        nonlocal refused
        mutated = copy.deepcopy(config)
        put(mutated, place, value)
        (path / "config.json").write_text(json.dumps(mutated))
        try:
            model = load_target(path)
        except REFUSED:
            refused += 1
            return
        with torch.inference_mode():
            logits, _ = model(torch.arange(5), [(model.new_cache(), 5)])
        assert logits.isfinite().all(), f"{'.'.join(place)} = {value!r}"

    check()
    assert refused > 15
