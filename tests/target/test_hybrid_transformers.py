"""The hybrid target against transformers, on random weights at which a wrong norm, decay or gate shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoConfig,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
)

from dspark.checkpoint.describe import inspect_checkpoint
from dspark.target import Target, load_target
from hybrid_zoo import VOCAB, hybrid_config, hybrid_tensors, wrapped, wrapped_tensors, write, write_hybrid

ROWS = 150
"""More than two pieces of the delta rule."""

CASES: dict[str, dict[str, Any]] = {
    "two-and-six-heads": {},
    "equal-heads": {"linear_num_key_heads": 3, "linear_num_value_heads": 3},
    "one-key-head-tied": {"linear_num_key_heads": 1, "tie_word_embeddings": True},
    "square-heads-short-kernel": {"linear_value_head_dim": 8, "linear_conv_kernel_dim": 2},
    "attention-bias": {"attention_bias": True},
    "interval": {"layer_types": None, "full_attention_interval": 2},
    "half-rotary": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    },
    "whole-rotary": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}
    },
    "default-rotary": {"rope_parameters": {"rope_type": "default", "rope_theta": 700.0}, "head_dim": 24},
    "multimodal-sections": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 500.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        }
    },
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "partial_rotary_factor": 0.5,
        }
    },
}


def theirs(path: Path, dtype: torch.dtype) -> torch.nn.Module:
    config = AutoConfig.from_pretrained(path)
    config._attn_implementation = "eager"
    model = Qwen3_5ForCausalLM(config).to(dtype).eval()
    missing, unexpected = model.load_state_dict(load_file(path / "model.safetensors"), strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model


def tokens(count: int, seed: int = 2) -> Tensor:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def whole(model: Target, ids: Tensor, taps: tuple[int, ...] = (-1, 0, 2)) -> tuple[Tensor, Tensor]:
    logits, tapped = model(ids, [(model.new_cache(), len(ids))], taps)
    assert tapped is not None
    return logits, tapped


@pytest.mark.parametrize("case", CASES)
def test_logits_and_taps_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    path = write_hybrid(tmp_path, **CASES[case])
    ids = tokens(ROWS)
    with torch.no_grad():
        expected = theirs(path, torch.float64)(ids[None], output_hidden_states=True)
    logits, tapped = whole(load_target(path), ids)
    hidden = torch.cat([expected.hidden_states[i][0] for i in (0, 1, 3)], dim=-1)
    # transformers norms, decays and runs the delta rule in float32 even here: that is all that differs.
    scale = expected.logits.abs().max()
    assert scale > 1.0
    assert (logits - expected.logits[0]).abs().max() < 2e-5 * scale
    assert (tapped - hidden).abs().max() < 2e-5 * hidden.abs().max()


@pytest.mark.parametrize("case", ["two-and-six-heads", "attention-bias"])
def test_cached_calls_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    """Theirs goes on token by token with its own cache, ours in blocks."""
    path = write_hybrid(tmp_path, **CASES[case])
    model, ids = theirs(path, torch.float64), tokens(40)
    with torch.no_grad():
        out = model(ids[None, :20], use_cache=True)
        rows = [out.logits[0]]
        for token in ids[20:]:
            out = model(token.view(1, 1), cache=out.cache, use_cache=True)
            rows.append(out.logits[0])
    expected = torch.cat(rows)
    ours = load_target(path)
    cache, got = ours.new_cache(), []
    with torch.inference_mode():
        for piece in ids.split([5, 1, 14, 8, 1, 1, 10]):
            got.append(ours(piece, [(cache, len(piece))])[0])
            cache.advance(len(piece))
    assert (torch.cat(got) - expected).abs().max() < 2e-5 * expected.abs().max()


def test_float32_stays_close(tmp_path: Path) -> None:
    path = write_hybrid(tmp_path)
    ids = tokens(ROWS, seed=3)
    with torch.no_grad():
        expected = theirs(path, torch.float32)(ids[None]).logits[0]
    logits, _ = whole(load_target(path, dtype=torch.float32), ids)
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize(
    "change",
    [
        ("input_layernorm.weight", 1e-3),
        ("q_norm.weight", 1e-3),
        ("A_log", 1e-3),
        ("dt_bias", 1e-3),
        ("linear_attn.norm.weight", 1e-3),
        ("conv1d.weight", 1e-3),
        ("model.norm.weight", 1e-3),
    ],
    ids=lambda change: change[0],
)
def test_the_comparison_would_show_a_small_mistake(change: tuple[str, float], tmp_path: Path) -> None:
    """One part in a thousand of one kind of tensor, where w for 1 + w is a factor of two and more."""
    name, size = change
    config = hybrid_config()
    tensors, ids = hybrid_tensors(config), tokens(ROWS)
    right, _ = whole(load_target(write(tmp_path / "right", config, tensors)), ids)
    moved = {key: tensor * (1 + size) if name in key else tensor for key, tensor in tensors.items()}
    other, _ = whole(load_target(write(tmp_path / "wrong", config, moved)), ids)
    assert (right - other).abs().max() > 5e-5 * right.abs().max()


def test_bfloat16_follows_transformers_as_far_as_its_digits_go(tmp_path: Path) -> None:
    path = write_hybrid(tmp_path)
    ids = tokens(40, seed=4)
    exact, _ = whole(load_target(path), ids)
    with torch.no_grad():
        their_error = (theirs(path, torch.bfloat16)(ids[None]).logits[0] - exact).abs().mean()
    for dtype in (torch.bfloat16, torch.float16):
        target = load_target(path, dtype=dtype)
        logits, _ = whole(target, ids)
        assert logits.dtype == dtype
        assert (logits - exact).abs().mean() < 1.1 * their_error
        assert target.new_cache().state.dtype == torch.float32


def test_the_wrapped_checkpoint_is_the_same_model(tmp_path: Path) -> None:
    """Prefixed names, text_config, a vision tower and an mtp layer beside the text model."""
    config = hybrid_config()
    tensors, ids = hybrid_tensors(config), tokens(30)
    plain = load_target(write(tmp_path / "plain", config, tensors))
    wrapper = load_target(write(tmp_path / "wrapped", wrapped(config), wrapped_tensors(tensors)))
    assert torch.equal(whole(plain, ids)[0], whole(wrapper, ids)[0])
    assert wrapper.config.max_position_embeddings == 512


def test_a_multimodal_checkpoint_as_transformers_saves_it(tmp_path: Path) -> None:
    """Names and config are transformers' own here, those of the vision tower too."""
    config = hybrid_config()
    text = {key: value for key, value in config.items() if key != "architectures"}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision))
    generator = torch.Generator().manual_seed(7)
    model = model.to(torch.float64).eval()
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            size = 0.3 if parameter.dim() < 2 else 1.3 / parameter.shape[-1] ** 0.5
            noise = size * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + noise if "linear_attn.norm" in name else noise)
    model.save_pretrained(tmp_path)
    ids = tokens(50)
    with torch.no_grad():
        expected = model(ids[None]).logits[0]
    logits, _ = whole(load_target(tmp_path), ids)
    assert (logits - expected).abs().max() < 2e-5 * expected.abs().max()
    described = inspect_checkpoint(tmp_path)
    assert described["ignored_tensors"]["model.visual."] > 5 and not described["unused_tensors"]
