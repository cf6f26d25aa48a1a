"""Hybrid checkpoints of every kind: what loads, what is counted, what is refused and how."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dspark.checkpoint.config_file import ConfigFile
from dspark.checkpoint.describe import inspect_checkpoint
from dspark.checkpoint.weights import WeightFiles
from dspark.errors import CheckpointError
from dspark.target import load_target
from dspark.target.config import TargetConfig
from dspark.target.families import family_of
from dspark.target.hybrid.config import HybridConfig
from dspark.target.hybrid.modules import HybridDecays, HybridWeights
from dspark.target.hybrid.parameters import hybrid_shapes
from dspark.text.files import eos_token_ids
from hybrid_zoo import hybrid_config, hybrid_tensors, wrapped, wrapped_tensors, write

Change = Callable[[dict[str, Any], dict[str, Tensor]], None]


def logits(path: Path, dtype: torch.dtype | str = "auto") -> Tensor:
    target = load_target(path, dtype=dtype)
    with torch.inference_mode():
        return target(torch.arange(20), [(target.new_cache(), 20)])[0]


def test_the_table_of_tensors_is_that_of_the_modules(tmp_path: Path) -> None:
    config = HybridConfig.from_directory(
        write(tmp_path, hybrid_config(attention_bias=True), {"x": torch.ones(1)})
    )
    with torch.device("meta"):
        modules = {name: tuple(p.shape) for name, p in HybridWeights(config).named_parameters()}
        small = {name: tuple(p.shape) for name, p in HybridDecays(config).named_parameters()}
    modules |= {re.sub(r"^(layers\.\d+)", r"\1.linear_attn", name): s for name, s in small.items()}
    assert hybrid_shapes(config) == modules


@pytest.mark.parametrize(
    "style", ["text in a wrapper's config", "older wrapper", "no architectures", "sharded"]
)
def test_the_same_model_however_it_is_packed(style: str, tmp_path: Path) -> None:
    config, tensors = hybrid_config(), hybrid_tensors(hybrid_config())
    expected = logits(write(tmp_path / "plain", config, tensors))
    path = tmp_path / "other"
    if style == "text in a wrapper's config":
        write(path, {**wrapped(config), "architectures": ["Qwen3_5ForCausalLM"]}, tensors)
    elif style == "older wrapper":
        write(path, wrapped(config), {f"language_model.{name}": tensor for name, tensor in tensors.items()})
    elif style == "no architectures":
        write(path, {**wrapped(config), "architectures": None}, wrapped_tensors(tensors))
    else:
        write(path, wrapped(config), {"mtp.x": torch.zeros(2)})
        (path / "model.safetensors").unlink()
        stored, places = wrapped_tensors(tensors), {}
        for shard in range(2):
            part = {name: stored[name].contiguous() for name in sorted(stored)[shard::2]}
            save_file(part, path / f"model-{shard}.safetensors")
            places |= dict.fromkeys(part, f"model-{shard}.safetensors")
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert torch.equal(logits(path), expected)


def test_inspect_counts_what_is_left_out(tmp_path: Path) -> None:
    config = hybrid_config()
    path = write(tmp_path, wrapped(config), wrapped_tensors(hybrid_tensors(config)))
    described = inspect_checkpoint(path)
    assert described["architecture"] == "Qwen3_5ForConditionalGeneration"
    assert described["ignored_tensors"] == {"mtp.": 1, "model.visual.": 2}
    assert described["unused_tensors"] == []
    assert described["warnings"] == [
        "text only: tensors of other parts are left out (1 mtp.*, 2 model.visual.*)"
    ]


def test_a_tensor_that_belongs_nowhere_is_still_a_warning(tmp_path: Path) -> None:
    config = hybrid_config()
    path = write(tmp_path, config, {**hybrid_tensors(config), "model.extra": torch.zeros(2)})
    assert inspect_checkpoint(path)["unused_tensors"] == ["model.extra"]


def test_the_end_token_may_be_the_text_configs(tmp_path: Path) -> None:
    write(tmp_path, wrapped(hybrid_config(eos_token_id=9)), {"x": torch.ones(1)})
    assert eos_token_ids(tmp_path) == (9,)


def test_decays_keep_their_digits_in_a_16_bit_model(tmp_path: Path) -> None:
    """Stored in float32 beside bfloat16 matrices, as published: rounding them would change every decay."""
    config = hybrid_config()
    tensors = {
        name: tensor.to(torch.float32 if "A_log" in name else torch.bfloat16)
        for name, tensor in hybrid_tensors(config).items()
    }
    path = write(tmp_path, config, tensors)
    rate = load_target(path)._layers.layers[0].mixer.rate
    exact = -tensors["model.layers.0.linear_attn.A_log"].exp()
    assert rate.dtype == torch.float32 and torch.allclose(rate.flatten(), exact, rtol=1e-6)


def test_tied_embeddings_and_norms_of_one(tmp_path: Path) -> None:
    config = hybrid_config(tie_word_embeddings=True)
    path = write(tmp_path, wrapped(config), wrapped_tensors(hybrid_tensors(config)))
    assert inspect_checkpoint(path)["tied_embeddings"]
    assert logits(path).isfinite().all()


REFUSED: dict[str, tuple[Change, str]] = {
    "a kind of layer": (
        lambda config, _: config.update(layer_types=["linear_attention", "sliding_attention"] * 2),
        "layer_types must be linear_attention or full_attention, found 'sliding_attention'",
    ),
    "layers": (
        lambda config, _: config.update(num_hidden_layers=3),
        "layer_types must be a list of 3 entries",
    ),
    "no attention": (
        lambda config, _: config.update(layer_types=["linear_attention"] * 4),
        "layer_types must be at least one full_attention",
    ),
    "heads": (
        lambda config, _: config.update(linear_num_value_heads=5),
        "linear_num_value_heads 5 is not a multiple of linear_num_key_heads 2",
    ),
    "rotary": (
        lambda config, _: config.update(partial_rotary_factor=0.5),
        "partial_rotary_factor is 0.5 but .*rope_parameters.partial_rotary_factor is 0.25",
    ),
    "odd rotary": (
        lambda config, _: config["rope_parameters"].update(partial_rotary_factor=0.2),
        "makes 3 rotating entries",
    ),
    "no gate": (lambda config, _: config.update(attn_output_gate=False), "attn_output_gate must be true"),
    "another gate": (
        lambda config, _: config.update(output_gate_type="sigmoid"),
        "output_gate_type must be 'swish' or 'silu', found 'sigmoid'",
    ),
    "activation": (
        lambda config, _: config.update(hidden_act="gelu"),
        "hidden_act must be 'silu', found 'gelu'",
    ),
    "quantised": (
        lambda config, _: config.update(quantization_config={"bits": 4}),
        "quantization_config is set; quantised weights are not supported",
    ),
    "mixture of experts": (
        lambda config, _: config.update(architectures=["Qwen3_5MoeForCausalLM"]),
        "architectures is Qwen3_5MoeForCausalLM",
    ),
    "no head": (
        lambda _, tensors: tensors.pop("lm_head.weight"),
        "tensor lm_head.weight is missing, but tie_word_embeddings is false",
    ),
    "no embeddings": (
        lambda _, tensors: tensors.pop("model.embed_tokens.weight"),
        "expected embed_tokens.weight under one of .*, found none of them",
    ),
    "two models": (
        lambda _, tensors: tensors.update(
            {"model.language_model.embed_tokens.weight": tensors["model.embed_tokens.weight"]}
        ),
        "found both model.language_model. and model.",
    ),
    "a row short": (
        lambda _, tensors: tensors.update(
            {"model.layers.0.linear_attn.dt_bias": tensors["model.layers.0.linear_attn.dt_bias"][:-1]}
        ),
        r"model.layers.0.linear_attn.dt_bias has the wrong shape, expected \[6\], found \[5\]",
    ),
    "no layer of full attention": (
        lambda config, _: config.get("text_config", config).update(
            {"layer_types": None, "full_attention_interval": 8}
        ),
        "num_hidden_layers must be at least 8, every 8th layer being one of full attention, found 4",
    ),
    "a bias": (
        lambda _, tensors: tensors.update({"model.layers.2.self_attn.q_proj.bias": torch.zeros(128)}),
        r"holds tensor model.layers.2.self_attn.q_proj.bias, but the config has no place for it "
        r"\(4 layers, attention biases false\)",
    ),
    "a bias of a convolution": (
        lambda _, tensors: tensors.update({"model.layers.0.linear_attn.conv1d.bias": torch.zeros(104)}),
        "holds tensor model.layers.0.linear_attn.conv1d.bias, but the config has no place",
    ),
    "a layer more": (
        lambda _, tensors: tensors.update({"model.layers.4.input_layernorm.weight": torch.ones(32)}),
        "holds tensor model.layers.4.input_layernorm.weight",
    ),
    "another dtype": (
        lambda _, tensors: tensors.update(
            {"model.layers.1.linear_attn.A_log": torch.ones(6, dtype=torch.int64)}
        ),
        "model.layers.1.linear_attn.A_log has dtype I64",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_what_is_wrong(case: str, tmp_path: Path) -> None:
    change, message = REFUSED[case]
    config = hybrid_config(rope_parameters={"rope_theta": 1e3, "partial_rotary_factor": 0.25})
    tensors = hybrid_tensors(config)
    change(config, tensors)
    path = write(tmp_path, config, tensors)
    for read in (load_target, inspect_checkpoint):
        with pytest.raises(CheckpointError, match=message):
            read(path)


@pytest.mark.parametrize("gate", [None, "swish", "silu"])
def test_names_of_the_gate_that_is_built(gate: str | None, tmp_path: Path) -> None:
    config = hybrid_config() | {"output_gate_type": gate}
    write(tmp_path, wrapped(config), wrapped_tensors(hybrid_tensors(hybrid_config())))
    assert inspect_checkpoint(tmp_path)["layers"] == 4
    config["output_gate_type"] = "sigmoid"
    write(tmp_path, wrapped(config), wrapped_tensors(hybrid_tensors(hybrid_config())))
    with pytest.raises(CheckpointError, match=r"text_config\.output_gate_type must be"):
        inspect_checkpoint(tmp_path)


def test_layers_inside_the_wrapper_may_hold_nothing_else_but_what_is_recomputed(tmp_path: Path) -> None:
    config = wrapped(hybrid_config())
    tensors = wrapped_tensors(hybrid_tensors(hybrid_config()))
    layer = "model.language_model.layers.2.self_attn."
    recomputed = {f"{layer}rotary_emb.inv_freq": torch.ones(2)}
    load_target(write(tmp_path / "older", config, {**tensors, **recomputed}))
    for path, name in ((tmp_path / "sinks", f"{layer}sinks"), (tmp_path / "k", f"{layer}k_proj.bias")):
        write(path, config, {**tensors, name: torch.zeros(4)})
        for read in (load_target, inspect_checkpoint):
            with pytest.raises(CheckpointError, match=f"holds tensor {name}, but the config has no place"):
                read(path)


def test_errors_inside_the_wrapper_name_the_whole_key(tmp_path: Path) -> None:
    config = wrapped(hybrid_config(linear_num_value_heads=7))
    with pytest.raises(CheckpointError, match=r"text_config\.linear_num_value_heads 7"):
        load_target(write(tmp_path, config, wrapped_tensors(hybrid_tensors(hybrid_config()))))
    config["text_config"]["tie_word_embeddings"] = True
    with pytest.raises(CheckpointError, match=r"text_config\.tie_word_embeddings is True"):
        HybridConfig.from_file(ConfigFile(tmp_path / "config.json", config))


def test_a_hybrid_config_is_not_read_as_a_dense_one(tmp_path: Path) -> None:
    file = ConfigFile(tmp_path / "config.json", hybrid_config())
    with pytest.raises(CheckpointError, match=r"architectures must be one of Llama.*, found 'Qwen3_5For"):
        TargetConfig.from_file(file)


VALUES: list[Any] = [None, -1, 0, 1, 3, 1.5, 1e300, 2**40, "x", True, [], ["x"], {}, {"rope_theta": "y"}]


@pytest.mark.parametrize("wrapper", [False, True])
def test_mutated_configs_are_refused_or_load(tmp_path: Path, wrapper: bool) -> None:
    """Every key with every kind of value: a `CheckpointError`, or a config that the same tensors fit."""
    base = hybrid_config(rope_parameters={"rope_theta": 1e3, "partial_rotary_factor": 0.25})
    tensors = hybrid_tensors(base)
    write(tmp_path, base, wrapped_tensors(tensors) if wrapper else tensors)
    weights, refused = WeightFiles.open(tmp_path), 0
    whole = wrapped(base) if wrapper else base
    keys = [*whole, *(f"text_config.{key}" for key in whole.get("text_config", ()))]
    for key in keys:
        for value in VALUES:
            config = json.loads(json.dumps(whole))
            inside = config["text_config"] if key.startswith("text_config.") else config
            inside[key.removeprefix("text_config.")] = value
            file = ConfigFile(tmp_path / "config.json", config)
            try:
                family_of(file).describe(file, weights)
            except CheckpointError as error:
                assert "\n" not in str(error)
                refused += 1
    assert refused > len(keys)
