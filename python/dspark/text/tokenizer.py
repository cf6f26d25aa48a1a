"""Text to token ids and back, with what the checkpoint says about special tokens and chats."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.processors import TemplateProcessing

from dspark.errors import CheckpointError, RequestError
from dspark.text.chat import ChatTemplates
from dspark.text.files import eos_token_ids, read_object, special_tokens

LONG = 4096
"""Texts of this many characters take a millisecond or so to encode: other threads must not wait for them."""


class Tokenizer:
    """The tokenizer of one checkpoint directory. Safe to share between threads.

    `eos_token_ids`: the ids that end a text. `special_token_ids`: those that `decode` leaves out.
    `decoder_steps`: the kinds of the decoder's steps, in order. `backend`: the `tokenizers` object.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, chat: ChatTemplates, eos_token_ids: tuple[int, ...]
    ) -> None:
        self.backend = backend
        self.eos_token_ids = eos_token_ids
        self.special_token_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.decoder_steps = _decoder_steps(backend)
        self._chat = chat

    @classmethod
    def from_directory(cls, directory: str | Path) -> Tokenizer:
        """Read `tokenizer.json` and its companions; CheckpointError where it is missing or damaged.

        A model without a tokenizer still answers token-id prompts: the caller decides whether it needs one.
        """
        directory = Path(directory)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                f"{directory} has no tokenizer.json: only prompts given as token ids can be used"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{path} is not a readable tokenizer: {error}") from error
        # If saved by training, these settings would silently cut or lengthen prompts.
        backend.no_truncation()
        backend.no_padding()
        settings = read_object(directory / "special_tokens_map.json") | read_object(
            directory / "tokenizer_config.json"
        )
        _apply_bos_eos(backend, settings, directory / "tokenizer_config.json")
        return cls(backend, ChatTemplates.from_directory(directory, settings), eos_token_ids(directory))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included; the model's own vocabulary may be padded beyond it."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint has a chat template."""
        return not self._chat.is_empty

    def with_template_options(self, options: Mapping[str, Any]) -> Tokenizer:
        """The same tokenizer with these keywords for its chats; errors as in `ChatTemplates.with_options`."""
        found = copy(self)
        found._chat = self._chat.with_options(options)
        return found

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with the beginning (or end) token where the checkpoint adds one."""
        return self._encode(text, add_special_tokens=True)

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a user's message in the checkpoint's chat template, or of the plain prompt where it
        has none; errors as in `ChatTemplates.render`."""
        if not self.has_chat_template:
            return self.encode(text)
        return self.render_chat([{"role": "user", "content": text}])

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids. Bytes that are not valid UTF-8 become U+FFFD; unknown ids give no text."""
        try:
            return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            raise RequestError(f"token ids must be integers from 0 on: {error}") from error

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        """Token ids of a chat in the checkpoint's template; errors as in `ChatTemplates.render`."""
        return self.encode_chat(self.chat_text(messages, tools, **template_kwargs))

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """A chat in the checkpoint's template, as text; errors as in `ChatTemplates.render`."""
        return self._chat.render(messages, tools, **template_kwargs)

    def encode_chat(self, text: str) -> list[int]:
        """Token ids of (a part of) `chat_text`. The template writes the special tokens itself; adding them
        again would double the first one."""
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if not isinstance(text, str):
            raise RequestError(f"a prompt is a string or a list of token ids, found {type(text).__name__}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(f"the prompt is not valid Unicode: {error}") from error
        if len(text) < LONG:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        # `encode` holds the GIL and `encode_batch` does not, so other threads go on meanwhile.
        return self.backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids


def _apply_bos_eos(backend: tokenizers.Tokenizer, settings: dict[str, Any], path: Path) -> None:
    """Let `add_bos_token` and `add_eos_token`, where given, decide what surrounds a prompt."""
    asked = {name: settings.get(f"add_{name}") for name in ("bos_token", "eos_token")}
    if all(value is None for value in asked.values()):
        return  # tokenizer.json's own rule
    named = special_tokens(settings)
    wanted: dict[str, int] = {}
    for name, value in asked.items():
        if not value:
            continue
        token = named.get(name)
        token_id = None if token is None else backend.token_to_id(token)
        if token is None or token_id is None:
            raise CheckpointError(
                f"{path}: add_{name} is true and {name} is {token!r}, which is not in the vocabulary"
            )
        wanted[token] = token_id
    before = [named["bos_token"]] if asked["bos_token"] else []
    after = [named["eos_token"]] if asked["eos_token"] else []
    backend.post_processor = TemplateProcessing(
        single=[*before, "$A", *after], pair=None, special_tokens=list(wanted.items())
    )


def _decoder_steps(backend: tokenizers.Tokenizer) -> tuple[str, ...]:
    if backend.decoder is None:
        return ()
    state = json.loads(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    return tuple(step["type"] for step in steps)
