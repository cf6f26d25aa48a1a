"""Targets against transformers, on random weights at which a wrong norm, bias or frequency shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from dspark.target import TargetModel, load_target
from model_zoo import VOCAB, write_target

POSITIONS = 150
"""Twice and more the original context of the cases below."""

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-llama3-tied-mlp-bias": (
        "llama",
        {
            "tie_word_embeddings": True,
            "mlp_bias": True,
            "max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "llama-attention-bias-head-dim": ("llama", {"attention_bias": True, "head_dim": 16}),
    "llama-no-gqa": ("llama", {"num_key_value_heads": 4}),
    "qwen2-biases": ("qwen2", {}),
    "qwen2-linear": (
        "qwen2",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2, "layer_types": None},
    ),
    "qwen3-qk-norm": ("qwen3", {}),
    "qwen3-yarn": (
        "qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "qwen3-yarn-every-switch": (
        "qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 6.0,
                "original_max_position_embeddings": 48,
                "beta_fast": 20.0,
                "beta_slow": 2.0,
                "mscale": 1.5,
                "mscale_all_dim": 0.5,
                "truncate": False,
            }
        },
    ),
    "qwen3-tied-windows": (
        "qwen3",
        {
            "tie_word_embeddings": True,
            "sliding_window": 17,
            "use_sliding_window": True,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
}


def theirs(path: Path, dtype: torch.dtype) -> torch.nn.Module:
    config = AutoConfig.from_pretrained(path)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    missing, unexpected = model.load_state_dict(load_file(path / "model.safetensors"), strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model


def full_pass(
    model: TargetModel, ids: torch.Tensor, taps: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.inference_mode():
        logits, tapped = model(ids, [(model.new_cache(), len(ids))], taps)
    assert tapped is not None
    return logits, tapped


@pytest.mark.parametrize("case", CASES)
def test_logits_and_taps_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    family, changes = CASES[case]
    path = write_target(tmp_path, family, **changes)
    ids = torch.randint(0, VOCAB, (POSITIONS,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = theirs(path, torch.float64)(ids[None], output_hidden_states=True)
    logits, tapped = full_pass(load_target(path), ids, (-1, 0, 2))
    hidden = torch.cat([expected.hidden_states[i][0] for i in (0, 1, 3)], dim=-1)
    # transformers normalises in float32 even here, which is all that is left of a difference.
    scale = expected.logits.abs().max()
    assert scale > 1.0
    assert (logits - expected.logits[0]).abs().max() < 1e-5 * scale
    assert (tapped - hidden).abs().max() < 1e-5 * hidden.abs().max()


@pytest.mark.parametrize("case", CASES)
def test_float32_stays_close(case: str, tmp_path: Path) -> None:
    family, changes = CASES[case]
    path = write_target(tmp_path, family, **changes)
    ids = torch.randint(0, VOCAB, (POSITIONS,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = theirs(path, torch.float32)(ids[None]).logits[0]
    logits, _ = full_pass(load_target(path, dtype=torch.float32), ids, (0,))
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize(
    ("case", "wrong"),
    [
        ("llama", {"rms_norm_eps": 1e-3}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 10100.0}}),
        ("qwen2-linear", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.04}}),
        (
            "qwen3-yarn",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                    "attention_factor": 1.0,
                }
            },
        ),
        ("qwen2-window", {"sliding_window": 10}),
    ],
)
def test_the_comparison_would_show_a_small_mistake(case: str, wrong: dict[str, Any], tmp_path: Path) -> None:
    family, changes = CASES[case]
    ids = torch.randint(0, VOCAB, (POSITIONS,), generator=torch.Generator().manual_seed(2))
    right, _ = full_pass(load_target(write_target(tmp_path / "right", family, **changes)), ids, (0,))
    other, _ = full_pass(
        load_target(write_target(tmp_path / "wrong", family, **{**changes, **wrong})), ids, (0,)
    )
    assert (right - other).abs().max() > 1e-3 * right.abs().max()


def test_bfloat16_follows_transformers_as_far_as_its_digits_go(tmp_path: Path) -> None:
    path = write_target(tmp_path, "qwen3")
    ids = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(4))
    exact, _ = full_pass(load_target(path), ids, (0,))
    with torch.no_grad():
        their_error = (theirs(path, torch.bfloat16)(ids[None]).logits[0] - exact).abs().mean()
    for dtype in (torch.bfloat16, torch.float16):
        logits, _ = full_pass(load_target(path, dtype=dtype), ids, (0,))
        assert logits.dtype == dtype
        assert (logits - exact).abs().mean() < 1.2 * their_error
