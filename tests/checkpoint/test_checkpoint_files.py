"""Weights on disk: what loads, and what is refused with file, tensor, expected and found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dspark.checkpoint.weights import WeightFiles
from dspark.errors import CheckpointError
from dspark.target import load_target
from model_zoo import HIDDEN, VOCAB, target_config, target_tensors, write_checkpoint, write_target

CONFIG = target_config("qwen3")
NAME = "model.layers.2.mlp.down_proj.weight"


def logits(path: Path, **options: object) -> Tensor:
    model = load_target(path, **options)  # type: ignore[arg-type]
    ids = torch.arange(9)
    with torch.inference_mode():
        return model(ids, [(model.new_cache(), 9)])[0]


def write_sharded(path: Path, tensors: dict[str, Tensor]) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    names, places = sorted(tensors), {}
    for index, part in enumerate((names[::3], names[1::3], names[2::3])):
        shard = f"model-0000{index + 1}-of-00003.safetensors"
        save_file({name: tensors[name] for name in part}, path / shard)
        places |= dict.fromkeys(part, shard)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return path


def test_shards_equal_a_single_file(tmp_path: Path) -> None:
    tensors = target_tensors(CONFIG)
    single = write_checkpoint(tmp_path / "single", CONFIG, tensors)
    sharded = write_sharded(tmp_path / "sharded", tensors)
    assert torch.equal(logits(single), logits(sharded))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_every_floating_dtype_loads_and_auto_keeps_it(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in target_tensors(CONFIG).items()}
    path = write_checkpoint(tmp_path, CONFIG, tensors)
    assert load_target(path).dtype == dtype
    assert logits(path).dtype == dtype
    exact = {name: tensor.double() for name, tensor in tensors.items()}
    expected = logits(write_checkpoint(tmp_path / "exact", CONFIG, exact))
    assert torch.equal(logits(path, dtype=torch.float64), expected), "widening changes nothing"


def test_auto_follows_most_of_the_weights(tmp_path: Path) -> None:
    tensors = target_tensors(CONFIG)
    mixed = {name: t.to(torch.float32 if "norm" in name else torch.bfloat16) for name, t in tensors.items()}
    assert load_target(write_checkpoint(tmp_path, CONFIG, mixed)).dtype == torch.bfloat16


def test_other_dtypes_cannot_be_asked_for(tmp_path: Path) -> None:
    path = write_target(tmp_path, "llama")
    for dtype in ("float8", torch.int8):
        with pytest.raises(CheckpointError, match="dtype must be 'auto', float64"):
            load_target(path, dtype=dtype)


def test_progress_counts_every_byte_once(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    tensors = target_tensors(CONFIG)
    load_target(
        write_sharded(tmp_path / "s", tensors), progress=lambda done, total: seen.append((done, total))
    )
    size = sum(tensor.numel() * 8 for tensor in tensors.values())
    assert len(seen) == len(tensors)
    assert seen[-1] == (size, size)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_loaded_weights_do_not_live_in_the_file(tmp_path: Path) -> None:
    path = write_target(tmp_path, "llama")
    model = load_target(path)
    before = model.embedding_weight.clone()
    file = path / "model.safetensors"
    file.write_bytes(b"\0" * file.stat().st_size)
    assert torch.equal(model.embedding_weight, before)


def refused(path: Path, *parts: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_target(path)
    for part in parts:
        assert part in str(caught.value)


def changed(path: Path, name: str, tensor: Tensor | None) -> Path:
    tensors = target_tensors(CONFIG)
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    return write_checkpoint(path, CONFIG, tensors)


def test_a_tensor_one_row_short(tmp_path: Path) -> None:
    path = changed(tmp_path, NAME, torch.zeros(HIDDEN - 1, 48))
    refused(path, "model.safetensors", NAME, "wrong shape", "expected [32, 48]", "found [31, 48]")


def test_a_missing_tensor(tmp_path: Path) -> None:
    refused(changed(tmp_path, NAME, None), "model.safetensors", f"{NAME} is missing", "[32, 48]")


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.float8_e4m3fn])
def test_a_wrong_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    path = changed(tmp_path, NAME, torch.zeros(HIDDEN, 48).to(dtype))
    stored = {torch.int8: "I8", torch.int64: "I64", torch.float8_e4m3fn: "F8_E4M3"}[dtype]
    refused(path, NAME, f"has dtype {stored}", "F64, F32, F16, BF16", "quantised")


@pytest.mark.parametrize("keep", [-1, -1000, 500, 8, 7, 0])
def test_a_truncated_file(keep: int, tmp_path: Path) -> None:
    path = write_target(tmp_path, "llama")
    file = path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:keep])
    if keep < 0:
        refused(
            path, str(file), "truncated", f"expected {len(content)} bytes", f"found {len(content) + keep}"
        )
    else:
        refused(path, str(file), f"{keep} bytes, header cut short")


@pytest.mark.parametrize(
    "content", [b"\x10\0\0\0\0\0\0\0not json at all!", b'\x0e\0\0\0\0\0\0\0{"a": [1, 2]}']
)
def test_a_file_that_is_not_safetensors(content: bytes, tmp_path: Path) -> None:
    path = write_target(tmp_path, "llama")
    (path / "model.safetensors").write_bytes(content)
    refused(path, "model.safetensors", "safetensors")


def test_a_missing_shard(tmp_path: Path) -> None:
    path = write_sharded(tmp_path / "s", target_tensors(CONFIG))
    (path / "model-00002-of-00003.safetensors").unlink()
    refused(path, "model.safetensors.index.json", "model-00002-of-00003.safetensors", "missing")


def test_a_tensor_that_is_not_in_its_shard(tmp_path: Path) -> None:
    path = write_sharded(tmp_path / "s", target_tensors(CONFIG))
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.extra.weight"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(content))
    refused(path, "model.extra.weight is in model-00001-of-00003.safetensors")
    index.write_text("{}")
    refused(path, "not an index")


def test_a_single_file_is_read_before_an_index(tmp_path: Path) -> None:
    """As in transformers, which would else read other weights: an index may be left from an older save."""
    path = write_sharded(tmp_path / "s", target_tensors(CONFIG, seed=1))
    stale = logits(path)
    write_checkpoint(path, CONFIG, target_tensors(CONFIG))
    expected = logits(write_target(tmp_path / "single", "qwen3"))
    assert torch.equal(logits(path), expected) and not torch.equal(stale, expected)
    assert [file.name for file in WeightFiles.open(path).files] == ["model.safetensors"]
    (path / "model-00002-of-00003.safetensors").unlink()
    assert torch.equal(logits(path), expected)


@pytest.mark.parametrize(
    ("file", "kind"), [("pytorch_model.bin", "pickled"), ("model.pt", "pickled"), ("m.gguf", "GGUF")]
)
def test_other_formats_are_named(file: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / file).write_bytes(b"")
    refused(tmp_path, f"{file} looks like {kind} weights", "not supported")


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    refused(tmp_path, "no config.json there")
    refused(tmp_path / "nowhere", "no config.json there")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    refused(tmp_path, "no model.safetensors and no model.safetensors.index.json")
    for content, message in (("[]", "expected a JSON object, found list"), ("{", "cannot be read as JSON")):
        (tmp_path / "config.json").write_text(content)
        refused(tmp_path, message)


def test_tied_and_untied_heads(tmp_path: Path) -> None:
    tied = write_target(tmp_path / "tied", "llama", tie_word_embeddings=True)
    model = load_target(tied)
    rows = torch.randn(2, HIDDEN, dtype=torch.float64)
    with torch.inference_mode():
        assert torch.allclose(model.project(rows), rows @ model.embedding_weight.T)
    tensors = target_tensors(target_config("llama"))
    del tensors["lm_head.weight"]
    untied = write_checkpoint(tmp_path / "untied", target_config("llama"), tensors)
    refused(untied, "lm_head.weight is missing", "tie_word_embeddings is false", f"[{VOCAB}, {HIDDEN}]")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "architectures is MistralForCausalLM; supported targets"),
        (
            {"architectures": ["LlamaForCausalLM", "Qwen2ForCausalLM"]},
            "is LlamaForCausalLM, Qwen2ForCausalLM;",
        ),
        ({"architectures": None, "model_type": "gpt2"}, "architectures is none, model_type 'gpt2'"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list of names"),
        ({"quantization_config": {"bits": 4}}, "quantised weights are not supported"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"vocab_size": "61"}, "vocab_size must be a positive integer, found '61'"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a positive integer, found True"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "hidden_size 32 is not a multiple"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"mlp_bias": "yes"}, "mlp_bias must be true or false, found 'yes'"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number"),
    ],
)
def test_configs_that_cannot_be_loaded(change: dict[str, object], message: str, tmp_path: Path) -> None:
    config = {**target_config("llama"), **change}
    tensors = target_tensors(target_config("llama"))
    write_checkpoint(tmp_path, {k: v for k, v in config.items() if v is not None}, tensors)
    refused(tmp_path, message)


def test_a_missing_architecture_is_recognised_by_its_model_type(tmp_path: Path) -> None:
    config = target_config("qwen2", architectures=None)
    assert load_target(write_checkpoint(tmp_path, config, target_tensors(config))).config.qkv_bias


def test_extra_tensors_are_known(tmp_path: Path) -> None:
    tensors = target_tensors(CONFIG) | {"mtp.weight": torch.zeros(3)}
    path = write_checkpoint(tmp_path, CONFIG, tensors)
    load_target(path)
    assert "mtp.weight" in WeightFiles.open(path)
    inverse = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(3)}
    load_target(write_checkpoint(tmp_path / "older", CONFIG, target_tensors(CONFIG) | inverse))


def test_parts_of_a_layer_that_the_config_has_no_place_for(tmp_path: Path) -> None:
    """Left out, the model would be another one."""
    biased = target_tensors(CONFIG) | {"model.layers.1.self_attn.q_proj.bias": torch.zeros(HIDDEN)}
    deeper = {name.replace("layers.1", "layers.4"): tensor for name, tensor in target_tensors(CONFIG).items()}
    for name, tensors in (
        ("layers.1.self_attn.q_proj.bias", biased),
        ("layers.4.", deeper | target_tensors(CONFIG)),
    ):
        path = write_checkpoint(tmp_path / name, CONFIG, tensors)
        refused(path, f"holds tensor model.{name}", "the config has no place for it")
