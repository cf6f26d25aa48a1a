"""Rotary embedding: where configs say it, and the frequencies against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from dspark.checkpoint.config_file import ConfigFile
from dspark.checkpoint.rope import RopeConfig, read_rope
from dspark.errors import CheckpointError
from dspark.layers.rotary import RotaryTable, inverse_frequencies, rotate

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def read(**values: Any) -> RopeConfig:
    return read_rope(ConfigFile(Path("config.json"), {"max_position_embeddings": 256, **values}))


@pytest.mark.parametrize(
    "values",
    [
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_scaling": {"rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 500000}, "rope_scaling": None},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 5e5}, "rope_scaling": {"rope_theta": None}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "default", "rope_type": "default"}},
    ],
)
def test_the_base_may_stand_in_any_place(values: dict[str, Any]) -> None:
    assert read(**values) == RopeConfig(kind="default", theta=5e5)


def test_the_base_has_a_default() -> None:
    assert read().theta == 10_000.0


@pytest.mark.parametrize(
    ("values", "places"),
    [
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}},
            "rope_theta is 10000.0 but rope_parameters.rope_theta is 1000000.0",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"rope_theta": 1e6}},
            "rope_parameters.rope_theta is 10000.0 but rope_scaling.rope_theta is 1000000.0",
        ),
        (
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": YARN},
            "rope_parameters.rope_type is 'default' but rope_scaling.rope_type is 'yarn'",
        ),
        (
            {"rope_scaling": {**YARN, "type": "linear"}},
            "rope_scaling.rope_type is 'yarn' but rope_scaling.type is 'linear'",
        ),
        (
            {"rope_scaling": YARN, "original_max_position_embeddings": 32},
            "original_max_position_embeddings is 32.0 but rope_scaling.original_max",
        ),
    ],
)
def test_two_values_are_refused_with_both_places(values: dict[str, Any], places: str) -> None:
    with pytest.raises(CheckpointError, match=places):
        read(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'; supported are"),
        ({"rope_scaling": {"type": "linear"}}, "'linear' needs a positive factor, found None"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": None}}, "needs a positive low_freq_factor"),
        ({"rope_scaling": {**YARN, "factor": 0}}, "needs a positive factor, found 0"),
        ({"rope_scaling": {**YARN, "factor": "4"}}, "rope_scaling.factor must be .*found '4'"),
        ({"rope_scaling": "yarn"}, "rope_scaling must be an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "differs by layer"),
    ],
)
def test_what_is_not_supported_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(**values)


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 3.0},
        LLAMA3,
        YARN,
        {**YARN, "beta_fast": 16.0, "beta_slow": 3.0},
        {**YARN, "mscale": 1.3, "mscale_all_dim": 0.7},
        {**YARN, "mscale": 1.3},
        {**YARN, "attention_factor": 1.25},
        {**YARN, "truncate": False},
        {**YARN, "factor": None},
        {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 8192},
    ],
)
@pytest.mark.parametrize("theta", [1e4, 1e7])
def test_tables_equal_those_of_transformers(parameters: dict[str, Any], theta: float) -> None:
    values = {**parameters, "rope_theta": theta}
    positions = torch.arange(1500)
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=128,
            num_attention_heads=4,
            head_dim=32,
            max_position_embeddings=256,
            rope_parameters=dict(values),
        )
    )
    cos, sin = theirs(torch.zeros(1), positions[None])
    rope = read(rope_parameters=values)
    frequencies, factor = inverse_frequencies(rope, 32)
    assert torch.allclose(frequencies, theirs.inv_freq, rtol=1e-6, atol=0)
    assert factor == pytest.approx(theirs.attention_scaling)
    rows = RotaryTable(rope, 32, torch.float32, torch.device("cpu")).span(0, 1500)
    flipped = torch.cat((-torch.ones(16), torch.ones(16)))
    assert (rows[0] - cos[0]).abs().max() < 2e-4
    assert (rows[1] * flipped - sin[0]).abs().max() < 2e-4


def test_a_rotation_keeps_lengths_and_depends_on_distance_alone() -> None:
    table = RotaryTable(RopeConfig(), 16, torch.float64, torch.device("cpu"))
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 3, 16, dtype=torch.float64)
    assert torch.allclose(rotate(q, table.span(700, 701)).norm(dim=-1), q.norm(dim=-1))

    def score(query: int, key: int) -> torch.Tensor:
        return (rotate(q, table.span(query, query + 1)) * rotate(k, table.span(key, key + 1))).sum(-1)

    assert torch.allclose(score(10, 3), score(300, 293), atol=1e-4)
    assert not torch.allclose(score(10, 3), score(11, 3), atol=1e-2)


def test_the_table_grows_without_changing() -> None:
    table = RotaryTable(RopeConfig(), 16, torch.float32, torch.device("cpu"))
    before = table.span(0, 512).clone()
    far = table.span(3000, 3003)
    assert torch.equal(table.span(0, 512), before)
    assert torch.equal(table.at(torch.tensor([3002, 5])), torch.stack((far[:, 2], before[:, 5]), dim=1))
    assert torch.equal(table.spans([(5, 6), (3000, 3001)])[:, 1], far[:, 0])
