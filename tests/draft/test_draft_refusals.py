"""Drafts that cannot be loaded are refused in one sentence that names the file, the key and what was seen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from dspark.draft import load_draft
from dspark.errors import CheckpointError, ConfigError
from dspark.target import load_target
from model_zoo import VOCAB, draft_tensors, flat_config, nested_config, write_checkpoint, write_target
from packaging_zoo import dflash_config
from places import RNN_DRAFT

Load = Callable[[dict[str, Any], dict[str, Tensor]], object]


@pytest.fixture
def read(tmp_path: Path) -> Load:
    """Writes a checkpoint and loads it for a target that would fit."""

    def write_and_load(config: dict[str, Any], tensors: dict[str, Tensor]) -> object:
        path = write_checkpoint(tmp_path / "draft", config, tensors)
        return load_draft(path, target=load_target(write_target(tmp_path / "target", "llama")))

    return write_and_load


@pytest.mark.parametrize("own", [True, False], ids=["flat", "nested"])
@pytest.mark.parametrize(
    ("switch", "message"),
    [
        ({"markov_head_type": "lstm"}, "markov_head_type is 'lstm'; known are vanilla, gated, rnn"),
        ({"markov_rank": -1}, "markov_rank must be an integer from 0"),
        ({"mask_token_id": VOCAB}, f"mask_token_id is {VOCAB}; expected an id below {VOCAB}"),
        ({"mask_token_id": None}, "mask_token_id is missing"),
        ({"block_size": 0}, "block_size must be a positive integer"),
        ({"block_size": 5, "training_block_size": 4}, "training_block_size 4 is less than block_size 5"),
        ({"target_layer_ids": []}, "target_layer_ids must be a list of integers"),
        ({"target_layer_ids": [0, 1, 3]}, "target_layer_ids has 3; expected -1 .embeddings. to 2"),
        ({"target_layer_ids": [-2, 0, 1]}, "target_layer_ids has -2"),
        ({"target_layer_ids": [0, 1]}, r"fc.weight has shape \[32, 96\].*expected \[32, 64\]|tap is 48"),
    ],
)
def test_impossible_switches_are_refused(own: bool, switch: dict[str, Any], message: str, read: Load) -> None:
    with pytest.raises((CheckpointError, ConfigError), match=message):
        read(flat_config(**switch) if own else nested_config(switch), draft_tensors(own=own))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            flat_config(architectures=["LlamaForCausalLM"]),
            "architectures has LlamaForCausalLM; known drafts are",
        ),
        (flat_config(architectures=["Qwen3Eagle3Model"]), "architectures has Qwen3Eagle3Model"),
        (
            nested_config(architectures=["DSparkDraftModel", "MysteryModel"]),
            "architectures has MysteryModel; known drafts are Qwen3DSparkModel",
        ),
        (
            flat_config(architectures=["Qwen3DSparkModel", "DSparkDraftModel"]),
            "not a known draft; seen: arch",
        ),
        (flat_config(transformer_layer_config={}), "aux_hidden_state_layer_ids is missing"),
        (
            flat_config(architectures=["Gemma4DSparkModel"], transformer_layer_config={}),
            "architectures must be dspark, dflash or one of DSparkSpeculator, .*, found 'Gemma4DSparkModel'",
        ),
        (
            dflash_config(architectures=["DFlash2DraftModel"]),
            "architectures has DFlash2DraftModel; known drafts are",
        ),
        (flat_config(rope_is_neox_style=False), "rope_is_neox_style is False, expected True or nothing"),
        (
            nested_config({"selector_rank": 32}),
            "selector_rank is 32, expected 0 or nothing; DFlash 2's selector",
        ),
        (
            flat_config(rope_parameters={"rope_type": "yarn", "factor": 4.0, "partial_rotary_factor": 0.25}),
            "partial_rotary_factor is 0.25; only 1.0 is supported here",
        ),
        (
            flat_config(draft_vocab_size=30),
            "draft_vocab_size is 30 of 61, but the map d2t .* is missing",
        ),
        (flat_config(draft_vocab_size=62), "draft_vocab_size 62 is more than the target's 61"),
        (nested_config({"attention_modes": 5}), "attention_mode is 5"),
        (nested_config({"sample_from_anchor": "no"}), "sample_from_anchor must be true or false"),
        (
            nested_config({"sample_from_anchor": False}, block_size=1),
            "block_size is 1, but the anchor's slot",
        ),
        (flat_config(block_size=2**40), "block_size must be a positive integer, found 1099511627776"),
        (flat_config(num_hidden_layers=2**30), "num_hidden_layers must be at most 4096"),
        (flat_config(rope_parameters={"rope_theta": 0}), "rope_theta is 0.0; expected more than 1"),
        (flat_config(rms_norm_eps=float("nan")), "rms_norm_eps must be a number, found nan"),
        (nested_config({"attention_mode": "mla"}), "attention_mode is 'mla'; supported are gqa, mha"),
        (nested_config({"attention_modes": ["gqa", "kda"]}), "attention_mode is 'kda'"),
        (flat_config(quantization_config={"bits": 4}), "quantised weights are not supported"),
        (flat_config(hidden_act="gelu"), "hidden_act is 'gelu'"),
        (
            flat_config(layer_types=["full_attention", "linear_attention"]),
            "layer_types must be full_attention or",
        ),
        (flat_config(layer_types=["full_attention"]), "layer_types must be a list of 2 entries"),
        (
            nested_config(use_sliding_window=True, max_window_layers=1),
            "sliding_window must be a number of positions, as use_sliding_window is true",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config: dict[str, Any], message: str, read: Load) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(config, draft_tensors(own="dflash_config" not in config))


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_the_flat_format_has_its_own_embeddings_and_head(name: str, read: Load) -> None:
    tensors = draft_tensors(own=True)
    del tensors[name]
    with pytest.raises(CheckpointError, match=f"tensor {name} is missing; the flat format"):
        read(flat_config(), tensors)


@pytest.mark.parametrize("name", ["fc.weight", "hidden_norm.weight", "layers.1.self_attn.k_norm.weight"])
def test_nothing_is_ever_initialised_at_random(name: str, read: Load) -> None:
    tensors = draft_tensors(own=False)
    del tensors[name]
    with pytest.raises(CheckpointError, match=f"tensor {name} is missing; expected"):
        read(nested_config(), tensors)


@pytest.mark.parametrize("said", ["vanilla", "gated"])
def test_a_markov_head_of_another_type_is_refused(said: str, tmp_path: Path) -> None:
    source = RNN_DRAFT
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"markov_head_type": said}))
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    message = f"markov_head_type is {said}, but .*joint_proj.weight, which only a head of type rnn has"
    with pytest.raises(CheckpointError, match=message):
        load_draft(tmp_path, target=None)
