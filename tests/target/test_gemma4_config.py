"""Gemma 4 configs: two spellings, stray keys, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dspark.checkpoint import inspect_checkpoint
from dspark.checkpoint.config_file import ConfigFile
from dspark.draft import load_draft
from dspark.draft.packaging import read_draft_directory
from dspark.errors import CheckpointError
from dspark.layers.rotary import inverse_frequencies
from dspark.target import load_target
from dspark.target.gemma4.config import Gemma4Config, KindHeads
from gemma4_zoo import (
    FULL,
    SLIDING,
    TEXT,
    draft_config,
    draft_tensors,
    published_config,
    their_model,
    write_draft,
    write_target,
    write_theirs,
)
from model_zoo import write_checkpoint

WRAPPED, PLAIN = "Gemma4UnifiedForConditionalGeneration", "Gemma4UnifiedForCausalLM"


def read(**changes: Any) -> Gemma4Config:
    values = {**published_config(PLAIN), **changes}
    return Gemma4Config.from_file(ConfigFile(Path("config.json"), values), PLAIN)


def test_the_published_spelling() -> None:
    config = read()
    assert config.heads == {SLIDING: KindHeads(8, 2, False), FULL: KindHeads(16, 1, True)}
    assert config.windows == (5, None, 5, 5, None)
    assert config.ropes[FULL].kind == "proportional"
    assert read(attention_k_eq_v=False).heads[FULL] == KindHeads(16, 2, False)
    assert read(global_head_dim=None).heads[FULL].head_dim == 512
    assert read(num_global_key_value_heads=None).heads[FULL].num_key_value_heads == 2
    assert read(rope_parameters=None).ropes[FULL].theta == 1_000_000.0


def test_the_spelling_of_transformers_with_padded_layer_numbers(tmp_path: Path) -> None:
    path = write_theirs(tmp_path, their_model(WRAPPED, num_hidden_layers=12, layer_types=None))
    values = json.loads((path / "config.json").read_text())["text_config"]
    assert sorted(values["per_layer_config"]) == ["05", "11"] and "global_head_dim" not in values
    told = inspect_checkpoint(path)
    assert told["heads_by_kind"][FULL] == {"head_dim": 16, "num_key_value_heads": 1, "shared_values": True}
    assert told["heads_by_kind"][SLIDING] == {
        "head_dim": 8,
        "num_key_value_heads": 2,
        "shared_values": False,
    }
    assert load_target(path).config.kinds.count(FULL) == 2


def test_both_spellings_at_once_must_agree() -> None:
    layers = {str(layer): {"head_dim": 16, "num_key_value_heads": 1} for layer in (1, 4)}
    assert read(per_layer_config=layers).heads == read().heads
    with pytest.raises(CheckpointError, match="global_head_dim is 32 but per_layer_config says 16"):
        read(per_layer_config=layers, global_head_dim=32)


def test_proportional_frequencies_are_those_of_transformers() -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.gemma4_unified import Gemma4UnifiedTextConfig

    for proportion, factor in ((0.25, 1.0), (0.3, 2.0), (1.0, 1.0)):
        block = {
            "rope_type": "proportional",
            "partial_rotary_factor": proportion,
            "rope_theta": 1e4,
            "factor": factor,
        }
        blocks = {**TEXT["rope_parameters"], FULL: block}
        theirs = Gemma4UnifiedTextConfig(**{**TEXT, "rope_parameters": blocks})
        expected, _ = ROPE_INIT_FUNCTIONS["proportional"](theirs, layer_type=FULL)
        found, scale = inverse_frequencies(read(rope_parameters=blocks).ropes[FULL], 16)
        assert torch.equal(found, expected) and scale == 1.0


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"enable_moe_block": True}, "enable_moe_block is true: a mixture of experts, which is not supported"),
    ({"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input is 256"),
    ({"num_kv_shared_layers": 2}, "num_kv_shared_layers is 2"),
    ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
    ({"hidden_activation": "silu"}, "hidden_activation is 'silu' instead of"),
    ({"quantization_config": {"bits": 4}}, "quantised weights are not supported"),
    ({"rms_norm_eps": -1e-6}, "rms_norm_eps must be a number above 0"),
    ({"final_logit_softcapping": 0}, "final_logit_softcapping must be a positive number"),
    ({"layer_types": [FULL] * 4 + [SLIDING]}, f"layer_types must be a list that ends with {FULL}"),
    ({"layer_types": [FULL] * 4}, "layer_types must be a list of 5 entries"),
    ({"layer_types": ["chunked_attention"] * 5}, "layer_types must be"),
    (
        {"per_layer_config": {"7": {"head_dim": 16}}},
        "per_layer_config must be an object with keys from 0 to 4",
    ),
    ({"per_layer_config": {"1": {"intermediate_size": 9}}}, "per_layer_config.1 must be head_dim and"),
    ({"per_layer_config": {"1": {"head_dim": 16}}}, "per_layer_config gives layer 4 other heads"),
    ({"num_attention_heads": 3}, "num_attention_heads 3 is not a multiple of 2 key and value heads"),
    ({"rope_parameters": {SLIDING: {"rope_theta": 1e4}}}, f"rope_parameters.{FULL} must be an object"),
    (
        {"rope_parameters": {**TEXT["rope_parameters"], FULL: {"rope_type": "default"}}},
        f"rope_parameters.{FULL} has no rope_theta",
    ),
    (
        {"rope_parameters": {**TEXT["rope_parameters"], "rope_theta": 5000.0}},
        r"rope_parameters.rope_theta is 5000.0, but the layers' own blocks",
    ),
    (
        {"rope_parameters": {**TEXT["rope_parameters"], FULL: {"rope_type": "spiral", "rope_theta": 1.0}}},
        "rope_type is 'spiral'",
    ),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refusals(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(**change)


def test_what_is_not_unified_has_embeddings_for_every_layer_unless_it_says_no(tmp_path: Path) -> None:
    values = {**published_config(PLAIN), "architectures": ["Gemma4ForCausalLM"]}
    write_checkpoint(tmp_path, values, {"x": torch.zeros(1)})
    with pytest.raises(CheckpointError, match="hidden_size_per_layer_input is 256"):
        load_target(tmp_path)


def test_a_wrapper_needs_its_text_config(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"architectures": [WRAPPED]}, {"x": torch.zeros(1)})
    with pytest.raises(CheckpointError, match="text_config is missing"):
        load_target(tmp_path)


def test_tensors_that_are_missing_or_misshapen_are_named(tmp_path: Path) -> None:
    tensors = load_file(write_target(tmp_path / "good") / "model.safetensors")
    name = "model.language_model.layers.1.self_attn.k_proj.weight"
    for change, message in (
        ({name: tensors[name][:-1]}, rf"{name} has the wrong shape, expected \[16, 32\], found \[15, 32\]"),
        ({"model.language_model.layers.3.layer_scalar": None}, "layers.3.layer_scalar is missing"),
    ):
        changed = {key: value for key, value in {**tensors, **change}.items() if value is not None}
        path = write_checkpoint(tmp_path / "bad", published_config(WRAPPED), changed)
        for use in (load_target, inspect_checkpoint):
            with pytest.raises(CheckpointError, match=message):
                use(path)


def test_an_untied_head_must_be_there(tmp_path: Path) -> None:
    tensors = load_file(write_target(tmp_path / "good") / "model.safetensors")
    values = {**published_config(WRAPPED), "tie_word_embeddings": False}
    with pytest.raises(
        CheckpointError, match=r"lm_head\.weight is missing, but tie_word_embeddings is false"
    ):
        load_target(write_checkpoint(tmp_path / "bad", values, tensors))


def test_a_layer_that_holds_more_than_its_config_says_is_refused(tmp_path: Path) -> None:
    """Values of a layer whose config takes them from the keys, a bias, a layer too many; but not what follows
    from the config."""
    tensors = load_file(write_target(tmp_path / "good") / "model.safetensors")
    layers = "model.language_model.layers."
    for name in ("1.self_attn.v_proj.weight", "0.self_attn.q_proj.bias", "5.layer_scalar"):
        changed = {**tensors, f"{layers}{name}": torch.zeros(16)}
        path = write_checkpoint(tmp_path / name, published_config(WRAPPED), changed)
        for use in (load_target, inspect_checkpoint):
            with pytest.raises(CheckpointError, match=f"holds tensor {layers}{name}, but the config has no"):
                use(path)
    older = {**tensors, f"{layers}0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    load_target(write_checkpoint(tmp_path / "older", published_config(WRAPPED), older))


def test_towers_are_left_out_and_counted(tmp_path: Path) -> None:
    tensors = load_file(write_target(tmp_path / "good") / "model.safetensors")
    extra = {
        "model.vision_embedder.patch_dense.weight": torch.zeros(2),
        "model.embed_vision.embedding_projection.weight": torch.zeros(2),
        "model.embed_audio.embedding_projection.weight": torch.zeros(2),
    }
    path = write_checkpoint(tmp_path / "all", published_config(WRAPPED), {**tensors, **extra})
    told = inspect_checkpoint(path)
    assert (told["role"], told["architecture"]) == ("target", WRAPPED)
    assert told["ignored_tensors"] == {
        "model.vision_embedder.": 1,
        "model.embed_vision.": 1,
        "model.embed_audio.": 1,
    }
    assert told["warnings"] == []
    assert told["parameters"] == sum(tensor.numel() for tensor in tensors.values())
    load_target(path)


def test_a_draft_is_known_by_name_or_by_its_layers(tmp_path: Path) -> None:
    named = write_draft(tmp_path / "named")
    nameless = write_draft(tmp_path / "nameless", architectures=None)
    assert read_draft_directory(named)[0] == read_draft_directory(nameless)[0]
    assert inspect_checkpoint(nameless)["role"] == "draft"
    foreign = write_draft(tmp_path / "foreign", architectures=["Qwen3DSparkModel"])
    with pytest.raises(CheckpointError, match="not a known draft"):
        load_draft(foreign, target=None)


def test_a_draft_in_the_spelling_of_transformers(tmp_path: Path) -> None:
    layers = {str(layer): {"head_dim": 16, "num_key_value_heads": 1} for layer in range(2)}
    published = write_draft(tmp_path / "published")
    values = draft_config(global_head_dim=None, num_global_key_value_heads=None, per_layer_config=layers)
    written = write_checkpoint(tmp_path / "written", values, draft_tensors(draft_config()))
    assert read_draft_directory(published)[0] == read_draft_directory(written)[0]


DRAFT_REFUSED: list[tuple[dict[str, Any], Callable[[dict[str, Any]], Any], str]] = [
    ({"target_layer_ids": [1, 0, 3]}, dict, "target_layer_ids must be a list that ascends"),
    ({"target_layer_ids": [0, 1, 4]}, dict, r"target_layer_ids has 4; expected -1 \(embeddings\) to 3"),
    ({"enable_moe_block": True}, dict, "a mixture of experts, which is not supported"),
    ({}, lambda t: t.pop("lm_head.weight"), "tensor lm_head.weight is missing; a Gemma 4 draft has its own"),
    ({}, lambda t: t.pop("embed_tokens.weight"), "tensor embed_tokens.weight is missing"),
    ({}, lambda t: t.pop("layers.1.layer_scalar"), "tensor layers.1.layer_scalar is missing"),
    ({"markov_rank": 4}, dict, "confidence_head.proj.weight has shape"),
    ({"global_head_dim": 32}, dict, "q_proj.weight has the wrong shape"),
]


@pytest.mark.parametrize(("change", "edit", "message"), DRAFT_REFUSED, ids=[m for _, _, m in DRAFT_REFUSED])
def test_draft_refusals(
    change: dict[str, Any], edit: Callable[[dict[str, Any]], Any], message: str, tmp_path: Path
) -> None:
    tensors = draft_tensors(draft_config())
    edit(tensors)
    path = write_checkpoint(tmp_path, draft_config(**change), tensors)
    for use in (lambda p: load_draft(p, target=None), inspect_checkpoint):
        with pytest.raises(CheckpointError, match=message):
            use(path)


ODD: list[Any] = [None, "x", -1, 3, 2.5, 10**400, float("nan"), True, [1], {"0": 1}]


def places(value: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every key of nested objects."""
    found = []
    for key, inner in value.items():
        found.append((*path, key))
        if isinstance(inner, dict):
            found += places(inner, (*path, key))
    return found


def mutated(values: dict[str, Any], place: tuple[str, ...], odd: Any) -> dict[str, Any]:
    copy = json.loads(json.dumps(values))
    block = copy
    for key in place[:-1]:
        block = block[key]
    block[place[-1]] = odd
    return copy


@pytest.mark.parametrize("role", ["published target", "written target", "draft"])
def test_no_odd_value_in_a_config_is_more_than_a_checkpoint_error(role: str, tmp_path: Path) -> None:
    layers = {str(layer): {"head_dim": 16, "num_key_value_heads": 1} for layer in (1, 4)}
    if role == "draft":
        values, path = draft_config(), write_draft(tmp_path / "good")
    else:
        extra = {"per_layer_config": layers} if role == "written target" else {}
        values, path = published_config(WRAPPED, **extra), write_target(tmp_path / "good")
    weights, refused = path / "model.safetensors", 0
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "model.safetensors").symlink_to(weights)
    for place in places(values):
        for odd in ODD:
            (bad / "config.json").write_text(json.dumps(mutated(values, place, odd)))
            try:
                inspect_checkpoint(bad)
            except CheckpointError as error:
                assert str(bad) in str(error)
                refused += 1
    assert refused > 60
