"""The converter from GGUF: rows in their order, values as stored, a tokenizer that splits digits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from dspark.errors import CheckpointError
from dspark.pretrained.gguf_tokenizer import build_tokenizer
from dspark.pretrained.gguf_weights import dequantise, llama_config, llama_tensors, open_gguf, unpermute
from dspark.pretrained.smollm2 import convert
from dspark.text import Tokenizer

gguf = pytest.importorskip("gguf")

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 2
ALPHABET = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 512))][:256]
VOCABULARY = ["<|end|>", "<|start|>", *(c for c in ALPHABET), "ĊĊ", "Ġ1", "12"]
MERGES = ["Ċ Ċ", "Ġ 1", "1 2"]


def quiet(message: str) -> None:
    del message


def rotary_shuffle(weight: np.ndarray, heads: int) -> np.ndarray:
    """What converters to GGUF do to q and k: the two halves of a head, interleaved row by row."""
    first, second = np.split(weight.reshape(heads, -1, weight.shape[1]), 2, axis=1)
    return np.stack([first, second], axis=2).reshape(weight.shape)


class TinyModel:
    """A GGUF file on disk and the weights that it ought to give."""

    def __init__(self, path: Path, **overrides: Any) -> None:
        rng = np.random.default_rng(5)
        self.path = path
        self.weights: dict[str, np.ndarray] = {}
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_block_count(LAYERS)
        writer.add_context_length(128)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(INNER)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_rope_freq_base(5000.0)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_dimension_count(overrides.get("rotated", HIDDEN // HEADS))
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(overrides.get("pre", "smollm"))
        writer.add_token_list(VOCABULARY)
        writer.add_token_types([3, 3] + [1] * (len(VOCABULARY) - 2))
        writer.add_token_merges(MERGES)
        for number, role in ((1, "bos"), (0, "eos"), (0, "pad"), (0, "unk")):
            getattr(writer, f"add_{role}_token_id")(number)
        writer.add_chat_template("{{ messages[0]['content'] }}")

        def put(theirs: str, ours: str, rows: int, columns: int | None, kind: str, heads: int = 0) -> None:
            shape = (rows,) if columns is None else (rows, columns)
            values = rng.standard_normal(shape).astype(np.float32)
            if kind == "F32":
                writer.add_tensor(theirs, rotary_shuffle(values, heads) if heads else values)
            else:
                quant = gguf.GGMLQuantizationType[kind]
                stored = gguf.quants.quantize(values, quant)
                values = gguf.quants.dequantize(stored, quant)
                if heads:  # rows move whole: quantisation is along the columns
                    stored = rotary_shuffle(stored, heads)
                writer.add_tensor(theirs, stored, raw_dtype=quant)
            self.weights[ours] = values

        put("token_embd.weight", "model.embed_tokens.weight", len(VOCABULARY), HIDDEN, "Q8_0")
        put("output_norm.weight", "model.norm.weight", HIDDEN, None, "F32")
        if overrides.get("untied"):
            put("output.weight", "lm_head.weight", len(VOCABULARY), HIDDEN, "F32")
        kv = HIDDEN // HEADS * KV_HEADS
        for i in range(LAYERS):
            mine = f"model.layers.{i}"
            put(f"blk.{i}.attn_norm.weight", f"{mine}.input_layernorm.weight", HIDDEN, None, "F32")
            put(f"blk.{i}.attn_q.weight", f"{mine}.self_attn.q_proj.weight", HIDDEN, HIDDEN, "Q4_1", HEADS)
            put(f"blk.{i}.attn_k.weight", f"{mine}.self_attn.k_proj.weight", kv, HIDDEN, "Q4_1", KV_HEADS)
            put(f"blk.{i}.attn_v.weight", f"{mine}.self_attn.v_proj.weight", kv, HIDDEN, "Q4_1")
            put(f"blk.{i}.attn_output.weight", f"{mine}.self_attn.o_proj.weight", HIDDEN, HIDDEN, "Q4_1")
            put(f"blk.{i}.ffn_norm.weight", f"{mine}.post_attention_layernorm.weight", HIDDEN, None, "F32")
            put(f"blk.{i}.ffn_gate.weight", f"{mine}.mlp.gate_proj.weight", INNER, HIDDEN, "Q4_1")
            put(f"blk.{i}.ffn_up.weight", f"{mine}.mlp.up_proj.weight", INNER, HIDDEN, "Q4_1")
            rows = overrides.get("down_rows", HIDDEN)
            if not (overrides.get("missing") and i == 1):
                put(
                    f"blk.{i}.ffn_down.weight",
                    f"{mine}.mlp.down_proj.weight",
                    rows,
                    INNER,
                    overrides.get("down", "Q4_1"),
                )
        if overrides.get("extra"):
            put("rope_freqs.weight", "extra", 8, None, "F32")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def test_the_rows_of_q_and_k_go_back_to_their_places() -> None:
    weight = np.arange(2 * 8 * 3, dtype=np.float32).reshape(16, 3)
    shuffled = rotary_shuffle(weight, heads=2)
    assert shuffled[:4, 0].tolist() == [0, 12, 3, 15]  # rows 0, 4, 1, 5 of the first head
    np.testing.assert_array_equal(unpermute(shuffled, 2), weight)


def test_a_block_of_q4_1_is_scale_times_nibble_plus_offset() -> None:
    nibbles = np.arange(32) % 16
    scale, offset = np.float16(0.37), np.float16(-1.5)
    packed = (nibbles[:16] | nibbles[16:] << 4).astype(np.uint8)
    block = np.concatenate([np.array([scale, offset]).view(np.uint8), packed])
    expected = nibbles.astype(np.float32) * np.float32(scale) + np.float32(offset)
    np.testing.assert_array_equal(dequantise(block[None], "Q4_1", "w")[0], expected)


def test_a_block_of_q8_0_is_scale_times_byte() -> None:
    values = np.arange(-16, 16, dtype=np.int8)
    block = np.concatenate([np.array([np.float16(0.11)]).view(np.uint8), values.view(np.uint8)])
    expected = values.astype(np.float32) * np.float32(np.float16(0.11))
    np.testing.assert_array_equal(dequantise(block[None], "Q8_0", "w")[0], expected)


@pytest.mark.parametrize("untied", [False, True])
def test_every_tensor_arrives_under_its_name_with_its_values(tmp_path: Path, untied: bool) -> None:
    model = TinyModel(tmp_path / "m.gguf", untied=untied)
    convert(model.path, tmp_path, quiet)
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == model.weights.keys()
    for name, expected in model.weights.items():
        np.testing.assert_array_equal(found[name], expected, err_msg=name)
    assert {w.dtype.name for w in found.values()} == {"float32"}
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is not untied


def test_the_configuration_is_read_by_transformers_as_meant(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    convert(TinyModel(tmp_path / "m.gguf").path, tmp_path, quiet)
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (HIDDEN, INNER, LAYERS)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (HEADS, KV_HEADS, 16)
    assert (config.max_position_embeddings, config.vocab_size) == (128, len(VOCABULARY))
    assert config.rope_parameters == {"rope_theta": 5000.0, "rope_type": "default"}
    assert config.rms_norm_eps == 1e-5  # not 9.999999747378752e-06
    assert (config.bos_token_id, config.eos_token_id) == (1, 0)
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


def test_digits_stand_alone_before_the_split_into_words(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(open_gguf(TinyModel(tmp_path / "m.gguf").path))
    # The vocabulary has `12` and `Ġ1`, and merges for both: only the pre-tokenizer keeps them apart.
    assert tokenizer.encode("\n\n1. 12").tokens == ["ĊĊ", "1", ".", "Ġ", "1", "2"]
    assert tokenizer.encode("a<|start|>").ids[-1] == 1
    assert tokenizer.decode(tokenizer.encode("né 12 <|end|>\n").ids) == "né 12 \n"


def test_the_directory_has_a_tokenizer_with_its_chat_template(tmp_path: Path) -> None:
    convert(TinyModel(tmp_path / "m.gguf").path, tmp_path, quiet)
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.eos_token_ids == (0,)
    assert tokenizer.decode(tokenizer.render_chat([{"role": "user", "content": "hi 12"}])) == "hi 12"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"down": "Q5_1"}, r"blk\.0\.ffn_down\.weight is stored as Q5_1"),
        ({"down_rows": HIDDEN - 1}, r"blk\.0\.ffn_down\.weight has shape \(63, 96\), expected \(64, 96\)"),
        ({"missing": True}, r"lacks the tensor for model\.layers\.1\.mlp\.down_proj\.weight"),
        ({"extra": True}, r"rope_freqs\.weight"),
        ({"rotated": 8}, "dimension_count is 8, expected the head size 16"),
    ],
)
def test_what_the_converter_does_not_know_is_refused_by_name(
    tmp_path: Path, overrides: dict[str, Any], said: str
) -> None:
    reader = open_gguf(TinyModel(tmp_path / "m.gguf", **overrides).path)
    with pytest.raises(CheckpointError, match=said):
        llama_tensors(reader, llama_config(reader), quiet)


def test_another_kind_of_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="gpt2/qwen2"):
        build_tokenizer(open_gguf(TinyModel(tmp_path / "m.gguf", pre="qwen2").path))


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"x" * 64)
    with pytest.raises(CheckpointError, match="not a readable GGUF"):
        open_gguf(tmp_path / "m.gguf")
