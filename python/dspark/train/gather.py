"""All conversations of a run: generated where asked for, read, sifted, split."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from dspark.decoder import DSparkDecoder
from dspark.errors import ConfigError
from dspark.text import Tokenizer
from dspark.train.data.conversations import Conversation, Sieve, split
from dspark.train.data.generate import Asked, answer, invent, read_prompts, settings_of
from dspark.train.data.read import ChatMarks, read_conversations
from dspark.train.data.shards import PER_SHARD, Shards
from dspark.train.report import Say
from dspark.train.settings import Settings

GENERATED = "data"


def generate(settings: Settings, say: Say) -> list[Path]:
    """Generates what is missing; returns the directories that hold what was asked for."""
    data = settings.data
    if data.prompts is None and not data.self_prompts:
        return []
    found: list[Path] = []
    with DSparkDecoder.from_pretrained(
        settings.target,
        data.draft,
        device=settings.device,
        dtype=settings.dtype,
        policy="fixed",
        max_batch_size=data.batch_size,
    ) as decoder:
        if data.prompts is not None:
            found.append(_answers(settings, decoder, data.prompts, say))
        if data.self_prompts:
            found.append(_self_made(settings, decoder, say))
    return found


def _answers(settings: Settings, decoder: DSparkDecoder, prompts: Path, say: Say) -> Path:
    data, seed = settings.data, settings.seed
    asked = read_prompts(prompts, data.samples)
    said = settings_of(
        "prompts",
        settings.target,
        data.sampling,
        seed,
        prompts=hashlib.blake2b(prompts.read_bytes(), digest_size=8).hexdigest(),
        samples=data.samples,
    )
    directory = settings.output / GENERATED / prompts.stem
    shards = Shards(directory, said)
    shards.fill(asked, lambda some: answer(decoder, some, data.sampling, seed), say)
    return directory


def _self_made(settings: Settings, decoder: DSparkDecoder, say: Say) -> Path:
    data, seed = settings.data, settings.seed
    openers = read_openers(data.openers)
    said = settings_of("self", settings.target, data.sampling, seed, openers=len(openers))
    directory = settings.output / GENERATED / "self-made"

    def make(numbers: Sequence[int]) -> list[Conversation]:
        asked: list[Asked] = invent(decoder, numbers, openers, data.user_sampling, seed)
        return answer(decoder, asked, data.sampling, seed)

    # Whole shards only: then more prompts can be asked for later, and nothing is made twice.
    count = -(-data.self_prompts // PER_SHARD) * PER_SHARD
    Shards(directory, said).fill(range(count), make, say)
    return directory


def read_openers(file: Path | None) -> list[str]:
    """Beginnings of users' turns, one a line."""
    if file is None:
        return []
    return [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def gather(
    settings: Settings, generated: Sequence[Path], tokenizer: Tokenizer | None, say: Say
) -> tuple[list[Conversation], list[Conversation]]:
    """(to train on, held out).

    Raises:
        ConfigError: one of the two is empty.
    """
    marks = ChatMarks(tokenizer) if tokenizer is not None and tokenizer.has_chat_template else None
    sieve = Sieve(settings.data.max_length)
    found = sieve(read_conversations([*settings.data.files, *generated], marks))
    trained, held_out = split(found, settings.data.held_out)
    tokens = sum(len(one.tokens) for one in trained)
    answers = sum(one.answer_tokens for one in trained)
    say(
        f"{len(trained):,} conversations of {tokens:,} tokens ({answers:,} in answers) to train on, "
        f"{len(held_out):,} held out; left out: {sieve.looping:,} that loop, {sieve.duplicate:,} duplicates, "
        f"{sieve.too_short:,} without an answer"
    )
    if not trained:
        raise ConfigError("no conversation is left to train on")
    return trained, held_out
