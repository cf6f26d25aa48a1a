"""What a target's text files do to loading it, and stop strings with a tokenizer that falls back on bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models

from commandline import link_target
from dspark import DSparkDecoder, SamplingParams
from dspark.errors import CheckpointError


def load(target: Path) -> DSparkDecoder:
    return DSparkDecoder.from_pretrained(target, None, device="cpu")


def test_a_missing_tokenizer_switches_text_off(tmp_path: Path) -> None:
    link_target(tmp_path, without=("tokenizer.json",))
    with load(tmp_path) as decoder:
        assert decoder.info()["switched_off"] == [
            f"text: {tmp_path} has no tokenizer.json: only prompts given as token ids can be used"
        ]


@pytest.mark.parametrize("content", ["", "{", '{"version": "1.0"}'])
def test_a_damaged_tokenizer_is_refused(tmp_path: Path, content: str) -> None:
    link_target(tmp_path, without=("tokenizer.json",))
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a readable tokenizer"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [("repetition_penalty", 0), ("top_k", 50.5), ("temperature", -1), ("temperature", "a"), ("top_p", [1])],
)
def test_bad_defaults_are_refused(tmp_path: Path, key: str, value: object) -> None:
    link_target(tmp_path, without=("generation_config.json",))
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": True, key: value}))
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {key} must be .* not "):
        load(tmp_path)


def test_usual_defaults_are_taken(tmp_path: Path) -> None:
    usual = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": None, "transformers_version": "4.51.0"}
    link_target(tmp_path, without=("generation_config.json",))
    (tmp_path / "generation_config.json").write_text(json.dumps(usual))
    with load(tmp_path) as decoder:
        assert len(decoder.generate([1], SamplingParams(max_tokens=2)).token_ids) == 2


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DSparkDecoder]:
    """The embedded target with a tokenizer as Llama 2 has it: bytes are tokens 3 to 258, then come words."""
    target = tmp_path_factory.mktemp("byte-fallback")
    link_target(target, without=("tokenizer.json",))
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    words |= {f"▁w{i}": i for i in range(259, 512)}
    backend = tokenizers.Tokenizer(models.BPE(words, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.save(str(target / "tokenizer.json"))
    with DSparkDecoder.from_pretrained(target, "tiny-draft", policy="fixed", device="cpu") as decoder:
        yield decoder


def repeated(token: int, stop: str) -> SamplingParams:
    return SamplingParams(max_tokens=5, temperature=0.0, stop=stop, logit_bias={token: 1e4})


def test_a_stop_string_of_byte_tokens_stops_at_once(byte_fallback: DSparkDecoder) -> None:
    result = byte_fallback.generate([300], repeated(3 + ord("\n"), "\n"))
    assert (len(result.token_ids), result.text) == (1, "")
    assert (result.finish_reason, result.stop_reason) == ("stop", "\n")
    result = byte_fallback.generate([300], repeated(3 + ord("\n"), "\n\n\n"))
    assert (len(result.token_ids), result.text, result.stop_reason) == (3, "", "\n\n\n")


def test_a_stop_string_in_the_last_text_only_cuts_it(byte_fallback: DSparkDecoder) -> None:
    # The first byte of a character that never ends, in a text that ends by its length.
    result = byte_fallback.generate([300], repeated(3 + 0xE4, "\ufffd" * 5))
    assert (len(result.token_ids), result.text) == (5, "")
    assert (result.finish_reason, result.stop_reason) == ("length", None)
