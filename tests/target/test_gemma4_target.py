"""The Gemma 4 target against transformers, on random weights at which any wrong piece shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.models.gemma4_unified.modeling_gemma4_unified import Gemma4UnifiedRMSNorm

from dspark.target import load_target
from dspark.target.gemma4.config import Gemma4Config
from dspark.target.gemma4.layer import embedding_scale
from dspark.target.gemma4.model import Gemma4TargetModel
from dspark.target.protocol import Target
from gemma4_zoo import VOCAB, published_config, their_model, write_target, write_theirs
from model_zoo import write_checkpoint

POSITIONS = 150
TAPS = (-1, 0, 1, 2, 3)
WRAPPED, PLAIN = "Gemma4UnifiedForConditionalGeneration", "Gemma4UnifiedForCausalLM"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "wrapped": (WRAPPED, {}),
    "plain": (PLAIN, {}),
    "values of their own": (WRAPPED, {"attention_k_eq_v": False}),
    "untied, uncapped": (WRAPPED, {"tie_word_embeddings": False, "final_logit_softcapping": None}),
    "biases": (PLAIN, {"attention_bias": True}),
    "default pattern of layers": (PLAIN, {"num_hidden_layers": 8, "layer_types": None}),
    "full layers only": (PLAIN, {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}),
    "not unified": ("Gemma4ForCausalLM", {}),
    "not unified, wrapped": ("Gemma4ForConditionalGeneration", {}),
}


def token_ids(count: int, seed: int = 2) -> Tensor:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def whole_pass(target: Any, ids: Tensor, taps: tuple[int, ...] = TAPS) -> tuple[Tensor, Tensor]:
    with torch.inference_mode():
        logits, tapped = target(ids, [(target.new_cache(), len(ids))], taps)
    return logits, tapped


def their_pass(model: Any, ids: Tensor, layers: int = 4) -> tuple[Tensor, Tensor]:
    """Logits, and the embeddings and the outputs of the first layers side by side."""
    with torch.no_grad():
        out = model(ids[None], output_hidden_states=True)
    return out.logits[0], torch.cat([state[0] for state in out.hidden_states[: layers + 1]], -1)


@pytest.mark.parametrize("case", CASES)
def test_logits_and_taps_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    """As 5.24 saves it, float64; transformers' own norms round to float32 on the way."""
    architecture, changes = CASES[case]
    model = their_model(architecture, **changes)
    ids = token_ids(POSITIONS)
    layers = model.config.get_text_config().num_hidden_layers
    taps = TAPS[: layers if layers < 4 else 5]
    expected, states = their_pass(model, ids, len(taps) - 1)
    target = load_target(write_theirs(tmp_path, model))
    assert isinstance(target, Target)
    logits, tapped = whole_pass(target, ids, taps)
    assert (logits - expected).abs().max() < 2e-5 * expected.abs().max()
    assert (tapped - states).abs().max() < 2e-5 * states.abs().max()


def test_nothing_but_their_rounding_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With norms that keep float64 the two agree to its digits."""

    def unrounded(self: Gemma4UnifiedRMSNorm, x: Tensor) -> Tensor:
        return self._norm(x) * self.weight if self.with_scale else self._norm(x)

    monkeypatch.setattr(Gemma4UnifiedRMSNorm, "forward", unrounded)
    model, ids = their_model(WRAPPED), token_ids(POSITIONS)
    expected, states = their_pass(model, ids)
    logits, tapped = whole_pass(load_target(write_theirs(tmp_path, model)), ids)
    assert (logits - expected).abs().max() < 1e-10
    assert (tapped - states).abs().max() < 1e-10


def test_placeholders_embed_as_padding_in_the_wrapper_alone(tmp_path: Path) -> None:
    model = their_model(WRAPPED, pad_token_id=9)
    model.config.image_token_id, model.config.audio_token_id = 5, 7
    ids = torch.tensor([1, 5, 2, 7, 9, 3])
    expected, states = their_pass(model, ids)
    target = load_target(write_theirs(tmp_path, model))
    logits, tapped = whole_pass(target, ids)
    assert (logits - expected).abs().max() < 2e-5 * expected.abs().max()
    assert (tapped - states).abs().max() < 2e-5 * states.abs().max()
    assert torch.equal(target.embed(ids)[1], target.embed(ids)[4])
    assert target.config.placeholders == {5: 9, 7: 9}


def test_both_spellings_of_the_config_are_one_model(tmp_path: Path) -> None:
    ids = token_ids(40)
    published = whole_pass(load_target(write_target(tmp_path / "published", WRAPPED)), ids)
    written = whole_pass(load_target(write_theirs(tmp_path / "written", their_model(WRAPPED))), ids)
    assert torch.equal(published[0], written[0])
    assert torch.equal(published[1], written[1])


def test_float32_stays_close(tmp_path: Path) -> None:
    path = write_target(tmp_path)
    ids = token_ids(POSITIONS)
    expected, _ = their_pass(their_model(WRAPPED).to(torch.float32), ids)
    logits, _ = whole_pass(load_target(path, dtype=torch.float32), ids)
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()


def test_bfloat16_follows_transformers_as_far_as_its_digits_go(tmp_path: Path) -> None:
    path, ids = write_target(tmp_path), token_ids(40)
    exact, _ = whole_pass(load_target(path), ids)
    theirs, embeddings = their_pass(their_model(WRAPPED).to(torch.bfloat16), ids, 0)
    for dtype in (torch.bfloat16, torch.float16):
        logits, tapped = whole_pass(load_target(path, dtype=dtype), ids, (-1,))
        assert logits.dtype == dtype
        assert (logits - exact).abs().mean() < 1.2 * (theirs - exact).abs().mean()
        if dtype == torch.bfloat16:
            assert torch.equal(tapped, embeddings), "the factor on embeddings is rounded as theirs is"


def test_the_factor_on_embeddings_is_rounded_to_their_dtype() -> None:
    assert embedding_scale(3840, torch.bfloat16) == 62.0
    assert embedding_scale(3840, torch.float32) == pytest.approx(3840**0.5, rel=1e-7)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rms_norm_eps": 1e-3},
        {"final_logit_softcapping": 3.05},
        {"sliding_window": 6},
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 101.0},
                "full_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1000.0,
                },
            }
        },
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1010.0,
                },
            }
        },
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
            }
        },
    ],
    ids=str,
)
def test_the_comparison_would_show_a_small_mistake(wrong: dict[str, Any], tmp_path: Path) -> None:
    path = write_target(tmp_path / "right")
    tensors = load_file(path / "model.safetensors")
    other = write_checkpoint(tmp_path / "wrong", published_config(WRAPPED, **wrong), tensors)
    ids = token_ids(POSITIONS)
    right, _ = whole_pass(load_target(path), ids)
    assert (right - whole_pass(load_target(other), ids)[0]).abs().max() > 1e-3 * right.abs().max()


def test_every_layer_scalar_counts_and_taps_come_after_it(tmp_path: Path) -> None:
    path, ids = write_target(tmp_path / "right"), token_ids(10)
    _, right = whole_pass(load_target(path), ids, (1,))
    tensors = load_file(path / "model.safetensors")
    name = "model.language_model.layers.1.layer_scalar"
    tensors[name] = tensors[name] * 3.0
    other = load_target(write_checkpoint(tmp_path / "other", published_config(WRAPPED), tensors))
    assert (whole_pass(other, ids, (1,))[1] - 3.0 * right).abs().max() < 1e-10


def test_the_frozen_and_the_differentiable_model_agree(tmp_path: Path) -> None:
    path, ids = write_target(tmp_path, PLAIN), token_ids(30)
    logits, tapped = whole_pass(load_target(path), ids)
    plain = Gemma4TargetModel(Gemma4Config.from_directory(path, PLAIN)).to(torch.float64)
    state = load_file(path / "model.safetensors")
    plain.load_state_dict({**state, "lm_head.weight": state["model.embed_tokens.weight"]})
    with torch.no_grad():
        expected, expected_taps = plain(ids, [(plain.new_cache(), 30)], TAPS)
    assert (logits - expected).abs().max() < 1e-10
    assert (tapped - expected_taps).abs().max() < 1e-10
