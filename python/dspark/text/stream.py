"""Text of a growing list of tokens, piece by piece, without showing half a character.

A character may be spread over several tokens, and some decoders look at a token's neighbours. The
promise is that the pieces joined are what decoding all tokens at once gives, that no U+FFFD is shown for
a character that was merely unfinished, and that the time is linear in the number of tokens.

One exception: ByteFallback decoders (`<0x0A>` tokens, as in Llama 2) make U+FFFD of every byte of a run of
such tokens if any byte of it is wrong, which is known only when the run is over. A stop string or a reader
cannot wait for that. Here a character of such a run is shown with its last byte, whatever follows, and only
the bytes that belong to no character become U+FFFD, one each. The texts differ only where a run is not valid
UTF-8; there, the text of this module has more characters.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import tokenizers

from dspark.text.tokenizer import Tokenizer


class TextStream:
    """Incremental decoding of one request's tokens."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._backend = tokenizer.backend
        self._hidden = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        steps = tokenizer.decoder_steps
        self._pieces: _Pieces
        if steps in (("ByteLevel",), ("ByteLevel", "Fuse")):
            self._pieces = _BytePieces()
        else:
            self._pieces = _WindowPieces(tokenizer.backend, "ByteFallback" in steps, "ByteLevel" in steps)

    def push(self, ids: Sequence[int]) -> str:
        """The text that becomes certain with these further tokens; empty while a character is unfinished."""
        shown = (self._backend.id_to_token(i) for i in ids if i not in self._hidden)
        # Unknown ids (a vocabulary padded beyond the tokenizer's) decode to nothing.
        return self._pieces.push([token for token in shown if token is not None])

    def flush(self) -> str:
        """What was held back, an unfinished character as U+FFFD. This ends the stream."""
        return self._pieces.flush()


class _Pieces(Protocol):
    def push(self, tokens: list[str]) -> str: ...

    def flush(self) -> str: ...


class _BytePieces:
    """Byte-level tokens: each is some bytes, and the text is their concatenation read as UTF-8."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, tokens: list[str]) -> str:
        return self._utf8.decode(b"".join(map(_token_bytes, tokens)))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowPieces:
    """Any other decoder: decode a short window of tokens twice, with and without the new ones, and compare.

    The window begins at the last piece shown, because a decoder may treat the first token differently (the
    leading space of a word).
    """

    # Tokens of context kept while they show nothing by themselves (spaces that a Strip step takes away).
    _CONTEXT = 16

    def __init__(self, backend: tokenizers.Tokenizer, byte_runs: bool, byte_level: bool) -> None:
        self._decoder = backend.decoder
        self._runs = _ByteRuns() if byte_runs else None
        self._byte_level = byte_level
        self._shown: list[str] = []  # context: the last tokens whose text was returned
        self._held: list[str] = []
        self._look_at = 0  # number of held tokens below which decoding them is useless
        self._before = ""  # text of `_shown`

    def push(self, tokens: list[str]) -> str:
        certain = tokens if self._runs is None else self._runs.push(tokens)
        self._held += certain
        if not certain or len(self._held) < self._look_at:
            return ""
        return self._show(final=False)

    def flush(self) -> str:
        if self._runs is not None:
            self._held += self._runs.flush()
        return self._show(final=True) if self._held else ""

    def _show(self, final: bool) -> str:
        text = self._decode(self._shown + self._held)
        if not final and self._byte_level and text.endswith("\ufffd"):
            # No character has more than four bytes: with more tokens held, the text is broken, and decoding
            # it again after every token would take quadratic time.
            self._look_at = len(self._held) + 1 if len(self._held) < 4 else 2 * len(self._held)
            return ""
        piece = text[len(self._before) :]
        self._slide()
        return piece

    def _slide(self) -> None:
        self._before = self._decode(self._held)
        if self._before:
            self._shown = self._held
        else:
            self._shown = (self._shown + self._held)[-self._CONTEXT :]
            self._before = self._decode(self._shown)
        self._held, self._look_at = [], 0

    def _decode(self, tokens: list[str]) -> str:
        # The library joins with spaces where a tokenizer has no decoder.
        return " ".join(tokens) if self._decoder is None else self._decoder.decode(tokens)


class _ByteRuns:
    """Passes `<0xE2>` tokens on character by character, so that a decoder sees only valid runs of them.

    A byte that belongs to no character is passed on as a token "\\ufffd", which also ends the run.
    """

    def __init__(self) -> None:
        self._open: list[str] = []  # the tokens of an unfinished character

    def push(self, tokens: list[str]) -> list[str]:
        certain: list[str] = []
        for token in tokens:
            if _is_byte(token):
                self._open.append(token)
                certain += self._settle()
            else:
                certain += [*self.flush(), token]
        return certain

    def flush(self) -> list[str]:
        broken, self._open = ["\ufffd"] * len(self._open), []
        return broken

    def _settle(self) -> list[str]:
        """The tokens that the newest byte settles: none, a whole character's, or those of broken bytes."""
        certain: list[str] = []
        while self._open:
            data = bytes(int(token[3:5], 16) for token in self._open)
            try:
                _, used = codecs.utf_8_decode(data, "strict", False)
            except UnicodeDecodeError as error:
                used = error.end
                certain += ["\ufffd"] * used
            else:
                if used == 0:
                    break
                certain += self._open[:used]
            self._open = self._open[used:]
        return certain


def _is_byte(token: str) -> bool:
    """Whether ByteFallback reads this token as one byte: `<0x0A>`."""
    if len(token) != 6 or not (token.startswith("<0x") and token.endswith(">")):
        return False
    return all(c in "0123456789abcdefABCDEF" for c in token[3:5])


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character: itself, or one from U+0100 on."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + k): byte for k, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


@lru_cache(maxsize=1 << 16)
def _token_bytes(token: str) -> bytes:
    """The bytes of a byte-level token; one outside the alphabet (an added token) stands for its own text."""
    try:
        return bytes(_ALPHABET[character] for character in token)
    except KeyError:
        return token.encode("utf-8")
