"""What rows of a block see: causal blocks against the plain formula, and every switch that would change what
a draft computes without being built."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.checkpoint import inspect_checkpoint
from dspark.draft import DSparkDraftModel, load_draft
from dspark.draft.packaging import read_draft_directory
from dspark.errors import CheckpointError, ConfigError
from dspark.target import TargetModel, load_target
from dspark.train.create import trainable
from gemma4_zoo import draft_config as gemma4_config
from gemma4_zoo import draft_tensors as gemma4_tensors
from model_zoo import (
    HIDDEN,
    draft_tensors,
    flat_config,
    nested_config,
    target_config,
    target_tensors,
    write_checkpoint,
    write_target,
)
from packaging_zoo import dflash_config, speculators_config
from plain_draft import WINDOW, plain_block, taps_of

Load = Callable[[dict[str, Any]], DSparkDraftModel]
PLAIN: dict[str, Any] = {"kind": None, "confidence": None}
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6}


def tensors_of(config: dict[str, Any]) -> dict[str, Tensor]:
    """Those that fit a config of the zoo."""
    architecture = config["architectures"][0]
    if architecture == "Gemma4DSparkModel":
        return gemma4_tensors(config)
    own = architecture == "Qwen3DSparkModel"
    return draft_tensors(own=own, **(PLAIN if architecture == "DFlashDraftModel" else {}))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return load_target(write_target(tmp_path_factory.mktemp("target"), "qwen3"))


@pytest.fixture
def load(tmp_path: Path, target: TargetModel) -> Load:
    def write_and_load(config: dict[str, Any]) -> DSparkDraftModel:
        return load_draft(write_checkpoint(tmp_path, config, tensors_of(config)), target=target)

    return write_and_load


CAUSAL: dict[str, dict[str, Any]] = {
    "at top level": nested_config(is_causal=True),
    "inside": nested_config({"causal": True}),
    "twice": nested_config({"causal": True}, is_causal=True),
    "some layers slide": nested_config(is_causal=True, **WINDOW),
    "all layers slide": nested_config(is_causal=True, **SLIDING),
    "a block of one": nested_config(is_causal=True, block_size=1),
}


@pytest.mark.parametrize("case", CAUSAL)
def test_causal_blocks_equal_the_plain_formula(case: str, load: Load) -> None:
    """In every layer; context in pieces, past the windows."""
    config = CAUSAL[case]
    draft, tensors = load(config), tensors_of(config)
    assert draft.config.causal
    embeddings = target_tensors(target_config("qwen3"))["model.embed_tokens.weight"]
    context, taps = draft.new_context(), taps_of(90)
    with torch.inference_mode():
        for start, stop in ((0, 1), (1, 4), (4, 6), (6, 90)):
            draft.extend([(context, stop - start)], taps[start:stop])
            hidden, _ = draft.block([7], [context])
            expected = plain_block(tensors, config, taps[:stop], 7, embeddings, causal=True)
            assert (hidden - expected).abs().max() < 1e-6, stop


def rows(draft: DSparkDraftModel) -> Tensor:
    context = draft.new_context()
    with torch.inference_mode():
        draft.extend([(context, 20)], taps_of(20))
        return draft.block([9], [context])[0]


def test_only_in_a_causal_block_the_first_rows_are_those_of_a_shorter_one(load: Load) -> None:
    """Else the tests above would prove nothing."""
    for causal in (True, False):
        long, short = (rows(load(nested_config(is_causal=causal, block_size=size))) for size in (5, 3))
        assert ((long[:3] - short).abs().max() < 1e-10) == causal
    dropped = load(dflash_config(is_causal=True))
    nothing = {"markov_rank": 0, "markov_head_type": None, "enable_confidence_head": False}
    anchored = nested_config(nothing, is_causal=True, architectures=["DFlashDraftModel"])
    assert (rows(dropped) - rows(load(anchored))[1:]).abs().max() < 1e-12


def test_inspect_says_whether_blocks_are_causal(tmp_path: Path) -> None:
    for causal in (True, False):
        config = nested_config(is_causal=causal)
        assert inspect_checkpoint(write_checkpoint(tmp_path, config, tensors_of(config)))["causal"] is causal


def test_a_causal_draft_is_not_trained_further(tmp_path: Path) -> None:
    config = nested_config(is_causal=True)
    with pytest.raises(ConfigError, match="rows do not see later ones cannot be trained"):
        trainable(write_checkpoint(tmp_path, config, tensors_of(config)))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "flat": (flat_config(is_causal=True), "is_causal or causal is true, .* nested and plain DFlash"),
    "speculators": (speculators_config(is_causal=True), "is_causal or causal is true"),
    "gemma4": (gemma4_config(is_causal=True), "is_causal or causal is true"),
    "two spellings": (
        nested_config({"causal": False}, is_causal=True),
        "is_causal is True but dflash_config.causal is False; they must be equal",
    ),
    "no flag": (nested_config(is_causal="yes"), "is_causal must be true or false, found 'yes'"),
    "sliding and not causal": (
        nested_config({"causal": False}, **SLIDING),
        "is_causal or causal is false, but layer_types has sliding_attention",
    ),
    "some slide and not causal": (dflash_config(is_causal=False, **WINDOW), "is_causal or causal is false"),
    "anchored and not causal": (
        speculators_config(is_causal=False, **WINDOW),
        "is_causal or causal is false",
    ),
    "windows on full layers": (
        nested_config({"use_swa": True, "swa_window_size": 6, "causal": False}),
        "use_swa is true, expected false or sliding_attention in layer_types",
    ),
    "windows where the format has none": (flat_config(use_swa=True, **WINDOW), "use_swa is true"),
    "two windows": (
        nested_config({"use_swa": True, "swa_window_size": 7}, **WINDOW),
        "swa_window_size is 7, but sliding layers have the window 6; they must be equal",
    ),
    "two windows in two places": (
        nested_config({"sliding_window": 7}, **WINDOW),
        "sliding_window is 6 but dflash_config.sliding_window is 7",
    ),
    "sinks": (
        nested_config({"attention_sink_bias": True}),
        "dflash_config.attention_sink_bias is True, expected False or nothing; attention with sinks is",
    ),
    "sinks at top level": (flat_config(add_swa_attention_sink_bias=True), "add_swa_attention_sink_bias is"),
    "sinks everywhere": (gemma4_config(add_full_attention_sink_bias=True), "add_full_attention_sink_bias is"),
    "pairs of neighbours": (nested_config(is_neox_style=False), "is_neox_style is False, expected True"),
    "scaled logits": (dflash_config(logit_scale=0.5), "logit_scale is 0.5, expected 1.0 or nothing"),
    "a flag for a factor": (dflash_config(logit_scale=True), "logit_scale is True, expected 1.0 or nothing"),
    "scaled values": (
        nested_config({"attention_value_scale": 0.707}),
        "dflash_config.attention_value_scale is 0.707, expected 1.0",
    ),
    "another context": (
        nested_config({"conditioning_source": "target_kv"}),
        "dflash_config.conditioning_source is 'target_kv', expected 'hidden' or nothing; a context from",
    ),
    "no projection": (nested_config({"use_aux_hidden_state": False}), "use_aux_hidden_state is False"),
    "normed taps": (nested_config({"fc_layernorm": True}), "fc_layernorm is True"),
    "a cap on its own head": (
        flat_config(final_logit_softcapping=30.0),
        "final_logit_softcapping is 30.0, expected nothing: lm_head.weight is the draft's own",
    ),
    "in another block": (
        nested_config(dspark_config={"dspark_logit_scale": 2}),
        "dspark_config.dspark_logit_scale is 2, expected 1.0",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_built_is_refused_by_name(case: str, tmp_path: Path) -> None:
    config, message = REFUSED[case]
    path = write_checkpoint(tmp_path, config, tensors_of(config))
    for read in (read_draft_directory, inspect_checkpoint):
        with pytest.raises(CheckpointError, match=message) as caught:
            read(path)
        assert str(path / "config.json") in str(caught.value) and "\n" not in str(caught.value)


def test_the_part_about_the_layers_is_read_too(tmp_path: Path) -> None:
    for changes, message in (
        ({"logit_scale": 0.5}, r"transformer_layer_config\.logit_scale is 0\.5, expected 1\.0"),
        ({"is_causal": True}, "is_causal or causal is true"),
    ):
        config = speculators_config()
        config["transformer_layer_config"] |= changes
        with pytest.raises(CheckpointError, match=message):
            read_draft_directory(write_checkpoint(tmp_path, config, tensors_of(config)))
    config = speculators_config(is_causal=False)
    config["transformer_layer_config"]["is_causal"] = True
    with pytest.raises(CheckpointError, match="is_causal is false, but true in transformer_layer_config"):
        read_draft_directory(write_checkpoint(tmp_path, config, tensors_of(config)))


NEUTRAL: dict[str, Any] = {
    "is_causal": False,
    "causal": False,
    "use_swa": False,
    "attention_sink_bias": False,
    "is_neox_style": True,
    "logit_scale": 1,
    "attention_value_scale": 1.0,
    "conditioning_source": "hidden",
    "use_aux_hidden_state": True,
    "fc_layernorm": False,
}


@pytest.mark.parametrize(
    "make", [flat_config, speculators_config, dflash_config, gemma4_config, nested_config]
)
def test_neutral_values_change_nothing(make: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    found = [
        read_draft_directory(write_checkpoint(tmp_path / str(len(changes)), config, tensors_of(config)))[0]
        for changes in ({}, NEUTRAL, dict.fromkeys(NEUTRAL) | {"x": None})
        for config in (make() | changes,)
    ]
    assert found[0] == found[1] == found[2] and not found[0].causal


def test_switches_may_repeat_what_the_layers_say(load: Load) -> None:
    said = {"use_swa": True, "swa_window_size": 6}
    found = load(nested_config(said | {"causal": True}, **SLIDING))
    assert found.config.windows == (6, 6)
    assert (rows(found) - rows(load(nested_config(**SLIDING)))).abs().max() < 1e-12
    assert load(nested_config(said, **WINDOW)).config == load(nested_config(**WINDOW)).config
    both = speculators_config(is_causal=False, sliding_window_non_causal=True, **WINDOW)
    assert load(both).config.window_rule == "anchored, bidirectional"
    assert load(flat_config(is_causal=False, **WINDOW)).config.windows == (None, None)


EXTRA = ("layers.0.self_attn.attention_sink_bias", "layers.1.self_attn.q_proj.bias", "layers.2.norm.weight")


@pytest.mark.parametrize("name", EXTRA)
@pytest.mark.parametrize(
    "make", [flat_config, speculators_config, dflash_config, gemma4_config, nested_config]
)
def test_a_layer_that_holds_more_than_its_config_says_is_refused(
    make: Callable[..., dict[str, Any]], name: str, tmp_path: Path, target: TargetModel
) -> None:
    config = make()
    tensors = tensors_of(config)
    path = write_checkpoint(tmp_path, config, tensors | {name: torch.zeros(HIDDEN)})
    message = f"model.safetensors: holds tensor {re.escape(name)}, but the config has no place for it"
    for read in (inspect_checkpoint, lambda path: load_draft(path, target=target)):
        with pytest.raises(CheckpointError, match=message):
            read(path)


def test_what_follows_from_the_config_may_be_stored(tmp_path: Path, target: TargetModel) -> None:
    tensors = draft_tensors(own=False) | {"layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    load_draft(write_checkpoint(tmp_path, nested_config(), tensors), target=target)


def test_masks_with_an_embedding_of_their_own_are_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, dflash_config(), draft_tensors(own=False, **PLAIN))
    (path / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"mask_embedding\.pt: a mask embedding outside of"):
        read_draft_directory(path)
