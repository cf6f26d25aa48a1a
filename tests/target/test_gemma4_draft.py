"""The Gemma 4 draft against the reference implementation's numbers, and against itself in pieces.

`data/gemma4/draft` is a random draft that DeepSpec (afdfa7c) built and saved under transformers 5.10.2, with
its config. `golden/golden.safetensors` is what DeepSpec computed with it in float64 (its norms round to
float32): for `taps` [30, 3 * 32] of a context and an anchor, the backbone's output, the soft-capped base
logits, and, going through the block greedily, the logits with the Markov bias, the tokens and the confidence
head's logits.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dspark.checkpoint import inspect_checkpoint
from dspark.checkpoint.config_file import ConfigFile
from dspark.draft import DSparkDraftModel, load_draft
from dspark.draft.build import build_draft
from dspark.draft.gemma4.model import Gemma4DSparkModel
from dspark.draft.packaging import read_draft_directory
from dspark.draft.parameters import draft_shapes
from dspark.target import load_target
from gemma4_zoo import HIDDEN, draft_config, draft_tensors, write_draft, write_target
from model_zoo import draft_tensors as plain_draft_tensors
from model_zoo import write_checkpoint
from packaging_zoo import dflash_config
from places import DATA

GOLDEN = DATA / "gemma4" / "draft"
EXACT = 1e-10


def taps_of(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3.0 * torch.randn(count, 3 * HIDDEN, generator=generator, dtype=torch.float64)


def block_of(draft: DSparkDraftModel, taps: Tensor, anchor: int = 7) -> tuple[Tensor, Tensor]:
    context = draft.new_context()
    with torch.inference_mode():
        draft.extend([(context, len(taps))], taps)
        return draft.block([anchor], [context])


def apart(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs.double()).abs().max())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 5e-6), (torch.float32, 2e-5)], ids=str)
def test_blocks_are_those_of_the_reference(dtype: torch.dtype, tolerance: float) -> None:
    golden = load_file(GOLDEN / "golden" / "golden.safetensors")
    draft = load_draft(GOLDEN, target=None, dtype=dtype)
    hidden, base = block_of(draft, golden["taps"].to(dtype), int(golden["anchor"]))
    previous = torch.cat((golden["anchor"], golden["tokens"][:-1]))
    with torch.inference_mode():
        steps = draft.markov_head.block(base, previous, hidden)
        confidence = draft.confidence_head(hidden, previous, draft.markov_head)
    assert apart(hidden, golden["hidden"]) < tolerance
    assert apart(base, golden["base_logits"]) < tolerance
    assert apart(steps, golden["step_logits"]) < tolerance
    assert apart(confidence, golden["confidence_logits"]) < tolerance
    assert steps.argmax(-1).tolist() == golden["tokens"].tolist()
    cap = draft.config.final_logit_softcapping
    assert golden["base_logits"].abs().max() < cap < golden["step_logits"].abs().max(), (
        "the bias is not capped"
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"rms_norm_eps": 1e-3},
        {"final_logit_softcapping": 3.05},
        {"final_logit_softcapping": None},
        {
            "rope_parameters": {
                "full_attention": {
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1010.0,
                    "rope_type": "proportional",
                }
            }
        },
        {"rope_parameters": {"full_attention": {"rope_theta": 1000.0, "rope_type": "default"}}},
        {"mask_token_id": 5},
    ],
    ids=str,
)
def test_the_comparison_would_show_a_small_mistake(wrong: dict[str, Any], tmp_path: Path) -> None:
    values = {**ConfigFile.read(GOLDEN / "config.json").values, **wrong}
    path = write_checkpoint(tmp_path, values, load_file(GOLDEN / "model.safetensors"))
    golden = load_file(GOLDEN / "golden" / "golden.safetensors")
    _, base = block_of(load_draft(path, target=None), golden["taps"])
    assert apart(base, golden["base_logits"]) > 1e-4


def test_window_and_kinds_of_layers_are_not_used(tmp_path: Path) -> None:
    taps = taps_of(20)
    one = load_draft(write_draft(tmp_path / "one"), target=None)
    changed = {"sliding_window": 2, "layer_types": ["sliding_attention", "full_attention"]}
    other = load_draft(write_draft(tmp_path / "other", **changed), target=None)
    assert torch.equal(block_of(one, taps)[1], block_of(other, taps)[1])


@pytest.mark.parametrize("shared", [True, False], ids=["shared values", "own values"])
def test_the_frozen_and_the_differentiable_draft_agree(shared: bool, tmp_path: Path) -> None:
    path = write_draft(tmp_path, attention_k_eq_v=shared)
    config, _ = read_draft_directory(path)
    plain = build_draft(config).to(torch.float64)
    assert isinstance(plain, Gemma4DSparkModel)
    plain.load_state_dict(load_file(path / "model.safetensors"))
    taps, context = taps_of(30), plain.new_context()
    with torch.no_grad():
        plain.extend([(context, 30)], taps)
        expected_hidden, expected = plain.block([7], [context])
    hidden, base = block_of(load_draft(path, target=None), taps)
    assert apart(hidden, expected_hidden) < EXACT
    assert apart(base, expected) < EXACT


def test_contexts_in_pieces_and_in_a_batch_equal_each_alone(tmp_path: Path) -> None:
    draft = load_draft(write_draft(tmp_path), target=None)
    lengths, taps = [1, 7, 40], [taps_of(n, n) for n in (1, 7, 40)]
    contexts = [draft.new_context() for _ in lengths]
    with torch.inference_mode():
        draft.extend([(contexts[0], 1), (contexts[2], 33)], torch.cat((taps[0], taps[2][:33])))
        draft.block([3, 5], [contexts[0], contexts[2]])  # leaves nothing behind
        draft.extend([(contexts[1], 7), (contexts[2], 7)], torch.cat((taps[1], taps[2][33:])))
        hidden, base = draft.block([9, 8, 7], contexts)
    size = draft.config.block_size
    for index, anchor in enumerate((9, 8, 7)):
        alone = block_of(draft, taps[index], anchor)
        assert apart(alone[0], hidden[index * size : (index + 1) * size]) < EXACT
        assert apart(alone[1], base[index * size : (index + 1) * size]) < EXACT


def test_every_slot_and_every_context_token_is_seen(tmp_path: Path) -> None:
    draft = load_draft(write_draft(tmp_path), target=None)
    taps = taps_of(12)
    _, base = block_of(draft, taps)
    assert torch.pdist(base).min() > 1e-3, "slots differ"
    for token in range(12):
        changed = taps.clone()
        changed[token] += 1.0
        assert (block_of(draft, changed)[1] - base).abs().amax(1).min() > 1e-6


@pytest.mark.parametrize("shared", [True, False], ids=["shared values", "own values"])
def test_inspect_and_the_modules_name_the_same_tensors(shared: bool, tmp_path: Path) -> None:
    path = write_draft(tmp_path, attention_k_eq_v=shared, attention_bias=False)
    config, _ = read_draft_directory(path)
    modules = {name: tuple(parameter.shape) for name, parameter in build_draft(config).named_parameters()}
    assert draft_shapes(config) == modules
    assert set(modules) == set(draft_tensors(draft_config(attention_k_eq_v=shared)))
    told = inspect_checkpoint(path)
    assert (told["role"], told["packaging"], told["architecture"]) == ("draft", "gemma4", "Gemma4DSparkModel")
    assert (told["head_dim"], told["key_value_heads"]) == (16, 1 if shared else 2)
    assert told["rope"]["kind"] == "proportional" and told["rope"]["theta"] == 1000.0
    assert told["final_logit_softcapping"] == 3.0
    assert told["warnings"] == [] and told["unused_tensors"] == []


def test_a_plain_dflash_draft_takes_scaled_embeddings_and_a_capped_head(tmp_path: Path) -> None:
    """The published drafts for Gemma 4 are trained so; their layers are Qwen's."""
    target = load_target(write_target(tmp_path / "target"))
    config = dflash_config(num_target_layers=5, final_logit_softcapping=3.0)
    tensors = plain_draft_tensors(own=False, kind=None, confidence=None)
    draft = load_draft(write_checkpoint(tmp_path / "draft", config, tensors), target=target)
    table = load_file(tmp_path / "target" / "model.safetensors")["model.language_model.embed_tokens.weight"]
    rows = taps_of(2)[:, :HIDDEN]
    with torch.inference_mode():
        assert apart(draft.embed(torch.tensor([5, 7])), table[[5, 7]] * HIDDEN**0.5) < 1e-5
        assert apart(draft.project(rows), 3.0 * torch.tanh(rows @ table.T / 3.0)) < EXACT
        assert apart(draft.project(rows), rows @ table.T) > 0.1


def test_shapes_at_full_size() -> None:
    """At a size like the published one (hidden 3840, heads of 512 on one key head), on the meta device."""
    config, _ = read_draft_directory(GOLDEN)
    full = replace(
        config,
        hidden_size=3840,
        target_hidden_size=3840,
        intermediate_size=15360,
        num_hidden_layers=5,
        num_attention_heads=16,
        head_dim=512,
        vocab_size=262144,
        draft_vocab_size=262144,
        markov_rank=256,
        block_size=7,
        training_block_size=7,
        target_layer_ids=(5, 17, 29, 41, 46),
        num_target_layers=48,
    )
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in build_draft(full).named_parameters()}
    assert shapes["layers.4.self_attn.q_proj.weight"] == (8192, 3840)
    assert shapes["layers.4.self_attn.k_proj.weight"] == (512, 3840)
    assert "layers.4.self_attn.v_proj.weight" not in shapes
    assert shapes["fc.weight"] == (3840, 5 * 3840)
    assert shapes["confidence_head.proj.weight"] == (1, 3840 + 256)
