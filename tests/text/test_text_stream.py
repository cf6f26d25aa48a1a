"""Streamed text: whole characters, equal to the text at the end, in linear time."""

from __future__ import annotations

import os
import time
from itertools import groupby
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from dspark.text import TextStream, Tokenizer
from dspark.text.chat import ChatTemplates
from places import TINY

TARGET = TINY / "target"
SMOLLM2 = Path(os.environ.get("DSPARK_CACHE", "~/.cache/dspark")).expanduser() / "smollm2"
# Two emoji, a rare ideograph, combining marks, a family of joined emoji.
HARD = "a\U0001fae0b\U0001f979 \u9f9c 你好 e\u0301\u0323 \U0001f468\u200d\U0001f469\u200d\U0001f467 naïve end"


def wrap(backend: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(backend, ChatTemplates({}, {}, "test"), ())


def with_specials(backend: tokenizers.Tokenizer) -> Tokenizer:
    """Special and plain added tokens, one of them with characters outside the byte alphabet."""
    backend.add_special_tokens([AddedToken("<|stop here|>", special=True), AddedToken("</s>", special=True)])
    backend.add_tokens([AddedToken("<tool call>"), AddedToken("né e")])
    return wrap(backend)


def byte_fallback(strip: bool) -> Tokenizer:
    """As sentencepiece models are converted: `▁` for spaces, `<0xNN>` for what the vocabulary lacks."""
    words = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁a",
        "a",
        "b",
        "▁end",
        "e",
        "n",
        "d",
        "▁▁",
        "你",
    ]
    backend = tokenizers.Tokenizer(
        models.BPE(
            {w: i for i, w in enumerate(words)}, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    return with_specials(backend)


def two_spaces_stripped() -> Tokenizer:
    tokenizer = byte_fallback(strip=False)
    tokenizer.backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 2, 0)]
    )
    return wrap(tokenizer.backend)


def metaspace() -> Tokenizer:
    words = ["<unk>", "▁", "▁a", "a", "b", "▁end", "e", "n", "d", "▁▁", "▁你", "好"]
    backend = tokenizers.Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return with_specials(backend)


def byte_level_in_sequence() -> Tokenizer:
    backend = tokenizers.Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    return with_specials(backend)


def word_piece() -> Tokenizer:
    words = ["[UNK]", "a", "##b", "end", ".", "##s", "do", "n't", "你"]
    backend = tokenizers.Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    return with_specials(backend)


TOKENIZERS = {
    "tiny": wrap(tokenizers.Tokenizer.from_file(str(TARGET / "tokenizer.json"))),
    "tiny with added tokens": with_specials(tokenizers.Tokenizer.from_file(str(TARGET / "tokenizer.json"))),
    "byte level in a sequence": byte_level_in_sequence(),
    "byte fallback": byte_fallback(strip=True),
    "byte fallback, space kept": byte_fallback(strip=False),
    "two spaces stripped": two_spaces_stripped(),
    "metaspace": metaspace(),
    "word piece": word_piece(),
}
if (SMOLLM2 / "tokenizer.json").is_file():
    TOKENIZERS["smollm2"] = wrap(tokenizers.Tokenizer.from_file(str(SMOLLM2 / "tokenizer.json")))
every_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)


@every_tokenizer
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_pieces_joined_are_the_text_at_the_end(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    size = tokenizer.vocab_size + 3  # a model's vocabulary may be padded beyond the tokenizer's
    ids = data.draw(st.lists(st.integers(0, size - 1) | st.integers(0, min(size, 270) - 1), max_size=60))
    skip = data.draw(st.booleans())
    stream, pieces, start = TextStream(tokenizer, skip_special_tokens=skip), [], 0
    while start < len(ids):
        width = data.draw(st.integers(0, 9))
        pieces.append(stream.push(ids[start : start + width]))
        start += width
    pieces.append(stream.flush())
    assert "".join(pieces) == whole_text(tokenizer, ids, skip)


def whole_text(tokenizer: Tokenizer, ids: list[int], skip: bool) -> str:
    """What `decode` gives, but with the valid characters of byte runs that are not valid as a whole."""
    if "ByteFallback" not in tokenizer.decoder_steps:
        return tokenizer.decode(ids, skip_special_tokens=skip)
    hidden = tokenizer.special_token_ids if skip else ()
    tokens = [tokenizer.backend.id_to_token(i) for i in ids if i not in hidden]
    shown, is_valid = [], True
    for is_run, group in groupby(filter(None, tokens), lambda t: t.startswith("<0x")):
        if not is_run:
            shown += group
            continue
        # "surrogateescape" makes one surrogate of each byte that belongs to no character.
        for character in bytes(int(t[3:5], 16) for t in group).decode("utf-8", "surrogateescape"):
            if "\udc80" <= character <= "\udcff":
                is_valid = False
                shown.append("\ufffd")
            else:
                shown += [f"<0x{byte:02X}>" for byte in character.encode()]
    text: str = tokenizer.backend.decoder.decode(shown)
    if is_valid:
        assert text == tokenizer.decode(ids, skip_special_tokens=skip)
    return text


@pytest.mark.parametrize("name", ["byte fallback", "byte fallback, space kept"])
@given(text=st.text(max_size=12), width=st.integers(1, 5))
@settings(max_examples=80, deadline=None)
def test_valid_byte_runs_join_to_the_text(name: str, text: str, width: int) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode("end " + text)
    stream = TextStream(tokenizer, skip_special_tokens=False)
    pieces = [stream.push(ids[k : k + width]) for k in range(0, len(ids), width)]
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False)
    assert stream.flush() == ""


@pytest.mark.parametrize(
    "name", [n for n in TOKENIZERS if n not in ("metaspace", "word piece", "two spaces stripped")]
)
@pytest.mark.parametrize("width", [1, 2, 3, 8])
def test_an_unfinished_character_is_held_back(name: str, width: int) -> None:
    tokenizer = TOKENIZERS[name]
    text = HARD
    ids = tokenizer.encode(text)
    assert len(ids) > len(text) / 2  # or nothing was split
    stream = TextStream(tokenizer)
    pieces = [stream.push(ids[k : k + width]) for k in range(0, len(ids), width)]
    assert not any("\ufffd" in piece for piece in pieces)
    # Without a Strip step the space that the normalizer put in front stays.
    assert ("".join(pieces) + stream.flush()).lstrip(" ") == text


@pytest.mark.parametrize("name", ["tiny", "byte fallback"])
def test_a_character_appears_with_its_last_token(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode("\U0001fae0\U0001fae0")[-8:]
    stream = TextStream(tokenizer)
    assert [stream.push([i]) for i in ids] == ["", "", "", "\U0001fae0"] * 2
    assert stream.flush() == ""


def test_a_wrong_byte_takes_nothing_back() -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    run = b"\n\xe4\xbd\xa0\xe4\n\xff."
    ids = [tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in run]
    stream = TextStream(tokenizer)
    assert [stream.push([i]) for i in ids] == ["\n", "", "", "你", "", "\ufffd\n", "\ufffd", "."]
    assert stream.push([tokenizer.backend.token_to_id("▁a")]) == " a"
    assert tokenizer.decode(ids) == "\ufffd" * len(run)  # where the library knows the whole run


@pytest.mark.parametrize("name", ["tiny", "byte fallback"])
def test_a_text_cut_inside_a_character_says_so_at_the_end(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode("b\U0001fae0")[:-1]
    stream = TextStream(tokenizer)
    assert stream.push(ids) in ("b", "")
    assert "\ufffd" in stream.flush()


def test_special_tokens_are_shown_only_when_asked_for() -> None:
    tokenizer = TOKENIZERS["tiny"]
    ids = [*tokenizer.encode("one"), 0, *tokenizer.encode("two")]
    assert TextStream(tokenizer).push(ids) == "onetwo"
    assert TextStream(tokenizer, skip_special_tokens=False).push(ids) == "one<|endoftext|>two"


def test_added_tokens_show_their_own_text() -> None:
    tokenizer = TOKENIZERS["tiny with added tokens"]
    # Both hold a space, which no token of the byte alphabet does.
    ids = [tokenizer.backend.token_to_id(token) for token in ("<tool call>", "<|stop here|>")]
    stream = TextStream(tokenizer, skip_special_tokens=False)
    assert [stream.push([i]) for i in ids] == ["<tool call>", "<|stop here|>"]


@pytest.mark.parametrize("name", ["two spaces stripped", "byte fallback"])
def test_spaces_that_show_nothing_at_the_start_do_so_later(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    space, word = (tokenizer.backend.token_to_id(token) for token in ("▁", "a"))
    ids = [word, *[space] * 40, word]
    stream = TextStream(tokenizer)
    assert "".join(stream.push([i]) for i in ids) == "a" + 40 * " " + "a"


def test_a_hidden_token_does_not_cost_the_next_word_its_space() -> None:
    tokenizer = TOKENIZERS["metaspace"]
    word, stop = tokenizer.backend.token_to_id("▁a"), tokenizer.backend.token_to_id("</s>")
    stream = TextStream(tokenizer)
    assert [stream.push([i]) for i in (word, stop, word, stop, word)] == ["a", "", " a", "", " a"]


@pytest.mark.parametrize("name", ["tiny", "byte fallback", "byte level in a sequence"])
def test_the_time_is_linear(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    one_byte = tokenizer.encode("\U0001fae0")[-1]  # a continuation byte: never a character by itself
    few, many = 500, 16_000
    times = []
    for ids in (
        [*tokenizer.encode("end a ") * 2000][:few],
        [*tokenizer.encode("end a ") * 8000][:many],
        [one_byte] * many,
    ):
        started = time.process_time()
        stream = TextStream(tokenizer)
        for i in ids:
            stream.push([i])
        stream.flush()
        times.append((time.process_time() - started) / len(ids))
    # Quadratic work would make the longer ones 32 times dearer per token.
    assert times[1] < 8 * times[0] + 1e-4
    assert times[2] < 8 * times[0] + 1e-4
