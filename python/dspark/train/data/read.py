"""Reading conversations: JSON lines with messages or token ids, or safetensors of token ids."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from dspark.errors import CheckpointError, DSparkError
from dspark.files import read_lines
from dspark.text import Tokenizer
from dspark.train.data.conversations import NO_FAILURES, Conversation, Tokens

KINDS = (".safetensors", ".jsonl")


class ChatMarks:
    """Where the target's answers are in a rendered chat: after what its template puts before an answer, up to
    the end token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        asked = [{"role": "user", "content": "x"}]
        with_tag = tokenizer.render_chat(asked)
        without = tokenizer.render_chat(asked, add_generation_prompt=False)
        # Empty where the template closes questions instead of opening answers, as Llama 2's does.
        self.opening = with_tag[len(without) :] if with_tag[: len(without)] == without else []
        self.ends = frozenset(tokenizer.eos_token_ids)

    def of_messages(self, messages: Sequence[Mapping[str, Any]]) -> Iterator[Conversation]:
        """The conversations of a chat whose answers the target gave: one for each answer, with everything
        before it as its prompt. Prompt and answer are tokenised separately, as in use."""
        dialogue: int | None = None
        for index, message in enumerate(messages):
            if message["role"] != "assistant" or index == 0:
                continue
            prompt = self._tokenizer.chat_text(messages[:index])
            text = self._tokenizer.chat_text(messages[: index + 1], add_generation_prompt=False)
            if not text.startswith(prompt):
                raise CheckpointError(
                    f"the chat template does not write message {index} behind what it writes before an "
                    "answer: give token ids with answer_start"
                )
            before = self._tokenizer.encode_chat(prompt)
            answer = self._tokenizer.encode_chat(text[len(prompt) :])
            stop = next((i + 1 for i, token in enumerate(answer) if token in self.ends), len(answer))
            tokens = np.array([*before, *answer[:stop]], np.int64)
            one = Conversation(tokens, ((len(before), len(tokens)),), dialogue=dialogue)
            dialogue = one.prompt_number()
            yield one

    def of_tokens(self, tokens: Tokens) -> Conversation:
        """A chat given as token ids. Of several end tokens that fill up its end, only the first is kept.

        Raises:
            CheckpointError: the template puts nothing before an answer.
        """
        if not self.opening:
            raise CheckpointError(
                "the target's chat template puts nothing before an answer, so answers in token ids cannot be "
                "told from questions: give messages, or token ids with answer_start"
            )
        stop = len(tokens)
        while stop > 1 and int(tokens[stop - 1]) in self.ends and int(tokens[stop - 2]) in self.ends:
            stop -= 1
        tokens = tokens[:stop]
        return Conversation(tokens, tuple(self._spans(tokens.tolist())))

    def _spans(self, tokens: list[int]) -> Iterator[tuple[int, int]]:
        at, width = 0, len(self.opening)
        while at + width <= len(tokens):
            if tokens[at : at + width] != self.opening:
                at += 1
                continue
            start = at + width
            ends = (i + 1 for i in range(start, len(tokens)) if tokens[i] in self.ends)
            at = next(ends, len(tokens))
            if at > start:
                yield start, at


def read_conversations(
    paths: Sequence[Path], marks: ChatMarks | None, vocab_size: int
) -> Iterator[Conversation]:
    """All conversations of files, and of directories in the order of their files' names.

    `marks` may be None if every file says where its answers start. `vocab_size` is the target's.

    Raises:
        CheckpointError: names the file and what is wrong with it.
    """
    for path in paths:
        files = sorted(f for f in path.rglob("*") if f.suffix in KINDS) if path.is_dir() else [path]
        if not path.exists():
            raise CheckpointError(f"{path}: no such file or directory")
        if not files:
            raise CheckpointError(f"{path}: no {' or '.join(KINDS)} files there")
        for file in files:
            if file.suffix not in KINDS or not file.is_file():
                raise CheckpointError(f"{file}: conversations are read from {' and '.join(KINDS)} files")
            read = (_of_jsonl if file.suffix == ".jsonl" else _of_safetensors)(file, marks)
            for index, one in enumerate(read):
                _check(one, vocab_size, f"{file}: conversation {index}")
                yield one


def _check(one: Conversation, vocab_size: int, where: str) -> None:
    foreign = one.tokens[(one.tokens < 0) | (one.tokens >= vocab_size)]
    if len(foreign):
        raise CheckpointError(
            f"{where} has the token {foreign[0]}, but the target's are 0 to {vocab_size - 1}: it was made "
            "with another tokenizer"
        )
    for start, stop in one.answers:
        if not 0 <= start <= stop:
            raise CheckpointError(f"{where}: an answer starts at {start} of {len(one.tokens)} tokens")


def _of_jsonl(file: Path, marks: ChatMarks | None) -> Iterator[Conversation]:
    try:
        lines = read_lines(file)
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: cannot be read as UTF-8 text ({error})") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{file}: line {number}"
        try:
            value = json.loads(line, strict=False)  # control characters may stand in texts
            if "token_ids" in value:
                tokens = np.array([_whole(token) for token in value["token_ids"]], np.int64)
                yield Conversation(tokens, ((_whole(value["answer_start"]), len(tokens)),))
            else:
                yield from _needed(marks, file).of_messages(value["messages"])
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise CheckpointError(
                f"{where}: expected an object with messages, or token_ids and answer_start ({error!r})"
            ) from error
        except DSparkError as error:
            raise CheckpointError(f"{where}: {error}") from error


def _whole(number: object) -> int:
    if type(number) is not int:
        raise TypeError(f"{number!r} is not a whole number")
    return number


def _of_safetensors(file: Path, marks: ChatMarks | None) -> Iterator[Conversation]:
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error})") from error
    if "lengths" not in tensors:
        for name in sorted(tensors):
            if tensors[name].ndim != 2:
                raise CheckpointError(
                    f"{file}: {name} has shape {list(tensors[name].shape)}; without lengths, every tensor is "
                    "a table of token ids, one conversation a row"
                )
            yield from (_told_apart(row.astype(np.int64), marks, file) for row in tensors[name])
        return
    lengths, tokens = tensors["lengths"].astype(np.int64), tensors["tokens"].astype(np.int64)
    if int(lengths.sum()) != len(tokens):
        raise CheckpointError(f"{file}: lengths add up to {int(lengths.sum())}, but tokens has {len(tokens)}")
    if not len(lengths):  # the tasks of a shard gave no conversation
        return
    pieces = np.split(tokens, np.cumsum(lengths)[:-1])
    starts, dialogues = tensors.get("answer_start"), tensors.get("dialogue")
    failures = [NO_FAILURES] * len(pieces)
    if "failed" in tensors:
        counts = tensors["failed_counts"].astype(np.int64)
        failures = np.split(tensors["failed"].astype(np.int64), np.cumsum(counts)[:-1])
    for index, piece in enumerate(pieces):
        if starts is None:
            yield _told_apart(piece, marks, file)
        else:
            dialogue = None if dialogues is None else int(dialogues[index])
            yield Conversation(piece, ((int(starts[index]), len(piece)),), failures[index], dialogue)


def _told_apart(tokens: Tokens, marks: ChatMarks | None, file: Path) -> Conversation:
    found = _needed(marks, file)
    try:
        return found.of_tokens(tokens)
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from error


def _needed(marks: ChatMarks | None, file: Path) -> ChatMarks:
    if marks is None:
        raise CheckpointError(
            f"{file}: does not say where answers start, and the target has no chat template that could tell"
        )
    return marks
