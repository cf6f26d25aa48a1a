"""All conversations of a run: generated where asked for, read, sifted, split."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dspark.decoder import DSparkDecoder
from dspark.errors import ConfigError
from dspark.pretrained import resolve
from dspark.serve.models import read_generation_config
from dspark.target.protocol import TargetSizes
from dspark.text import Tokenizer, eos_token_ids
from dspark.train.data.conversations import Conversation, Sieve, split
from dspark.train.data.generate import Asked, LeftOut, Sampling, answer, invent, read_prompts
from dspark.train.data.read import ChatMarks, read_conversations
from dspark.train.data.shards import PER_SHARD, Shards, shards_at_once
from dspark.train.identity import identity, named, text_identity
from dspark.train.report import Say
from dspark.train.settings import Settings
from dspark.train.world import World

GENERATED, SELF_MADE = "data", "self-made"
USERS = Sampling(temperatures=(1.0, 1.0), top_p=0.95, max_tokens=96)
"""How made-up users' turns are drawn."""


def directories(settings: Settings) -> dict[str, Path]:
    """Where generated conversations are, or will be, by their kind."""
    data, place = settings.data, settings.output / GENERATED
    found = {} if data.prompts is None else {"prompts": place / data.prompts.stem}
    return found | ({"self": place / SELF_MADE} if data.self_prompts else {})


def is_generated(settings: Settings, world: World) -> bool:
    """Whether every shard that this process has to make is there."""
    asked, numbers = _tasks(settings)
    work = {"prompts": len(asked), "self": len(numbers)}
    of = world.rank, world.size
    return not any(shards.missing(work[kind], *of) for kind, shards in _shards(settings).items())


def _tasks(settings: Settings) -> tuple[list[Asked], range]:
    """Prompts to answer, and numbers of prompts to make up."""
    data = settings.data
    asked = [] if data.prompts is None else read_prompts(data.prompts, data.samples)
    # Whole shards only: then more prompts can be asked for later, and nothing is made twice.
    return asked, range(-(-data.self_prompts // PER_SHARD) * PER_SHARD)


def generate(settings: Settings, world: World, say: Say) -> LeftOut:
    """Generates this process's share of what is missing; returns what it gave up on."""
    data = settings.data
    # The files are read first, so that errors in them are raised before a model is loaded.
    asked, numbers = _tasks(settings)
    shards, openers, left_out = _shards(settings), read_openers(data.openers), LeftOut()
    with DSparkDecoder.from_pretrained(
        settings.target,
        data.draft,
        device=str(world.device),
        dtype=settings.dtype,
        policy="fixed",
        max_batch_size=data.batch_size,
        # As many as all shards under way may submit, so that none has to wait for another's answers.
        max_queue_size=shards_at_once(data.batch_size) * PER_SHARD,
    ) as decoder:
        tokenizer = decoder.models.require_tokenizer().with_template_options(data.template_options)

        def answered(some: Sequence[Asked]) -> list[Conversation]:
            return answer(decoder, some, data.sampling, settings.seed, left_out, tokenizer)

        def self_made(some: Sequence[int]) -> list[Conversation]:
            return answered(invent(decoder, some, openers, USERS, settings.seed, left_out, tokenizer))

        if asked:
            shards["prompts"].fill(asked, answered, say, data.batch_size, world.rank, world.size)
        if numbers:
            shards["self"].fill(numbers, self_made, say, data.batch_size, world.rank, world.size)
    return left_out


def _shards(settings: Settings) -> dict[str, Shards]:
    """The shards of generated conversations, by their kind, with all settings that determine them."""
    data, said = settings.data, dict[str, dict[str, Any]]()
    if not directories(settings):
        return {}
    target = resolve(settings.target, "target")
    defaults = read_generation_config(target)
    if data.prompts is not None:
        said["prompts"] = {"prompts": _digest(data.prompts.read_bytes()), "samples": data.samples}
    if data.self_prompts:
        openers = _digest("\n".join(read_openers(data.openers)).encode())
        said["self"] = {"openers": openers, "users": USERS.filled(defaults)}
    answers = {
        **named(settings.target, identity(target)),
        "tokenizer_content": text_identity(target),
        "end_token_ids": list(eos_token_ids(target)),
        "template_options": data.template_options or None,
        "draft": None if data.draft is None else identity(resolve(data.draft, "draft")),
        "temperatures": list(data.sampling.temperatures),
        "top_p": data.sampling.top_p,
        "top_k": data.sampling.top_k,
        "sampling": data.sampling.filled(defaults),
        "max_tokens": data.sampling.max_tokens,
        "seed": settings.seed,
    }
    return {
        kind: Shards(directories(settings)[kind], {"kind": kind, **answers, **more})
        for kind, more in said.items()
    }


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def read_openers(file: Path | None) -> list[str]:
    """Beginnings of users' turns, one a line."""
    if file is None:
        return []
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the openers in {file} cannot be read: {error}") from error
    return [line for line in lines if line.strip()]


def tokenizer_of(settings: Settings, target: Path) -> Tokenizer | None:
    """The target's tokenizer, which renders chats with the settings' template options; None if it has none.

    Raises:
        ConfigError: there are template options, but no tokenizer.
        RequestError: there are template options, but the tokenizer has no chat template.
    """
    options = settings.data.template_options
    if (target / "tokenizer.json").exists():
        return Tokenizer.from_directory(target).with_template_options(options)
    if options:
        raise ConfigError(f"{target} has no tokenizer, so no chat template to give {', '.join(options)} to")
    return None


def marks_of(tokenizer: Tokenizer | None) -> ChatMarks | None:
    """How chats are read; None if the target has no chat template."""
    return ChatMarks(tokenizer) if tokenizer is not None and tokenizer.has_chat_template else None


def gather(
    settings: Settings, generated: Sequence[Path], tokenizer: Tokenizer | None, sizes: TargetSizes, say: Say
) -> tuple[list[Conversation], list[Conversation]]:
    """(to train on, held out); the latter may be empty, which is reported. `sizes` are the target's: longer
    conversations than its window are cut there, whatever `max_length` allows.

    Raises:
        ConfigError: nothing is left to train on, or nothing has the failures at which anchors are to be.
        CheckpointError: a file cannot be read, or holds tokens that the target does not have.
    """
    longest, window = settings.data.max_length, sizes.max_position_embeddings
    if longest > window:
        say(f"conversations are cut to the target's window of {window:,} tokens, not max_length {longest:,}")
    sieve = Sieve(min(longest, window))
    files = [*settings.data.files, *generated]
    found = sieve(read_conversations(files, marks_of(tokenizer), sizes.vocab_size))
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
    if settings.failed_anchors and not any(len(one.failed) for one in trained):
        raise ConfigError(
            f"failed_anchors is {settings.failed_anchors}, but no conversation says where a verify pass "
            "failed: only answers generated with a draft do"
        )
    if not held_out and settings.data.held_out and settings.held_out_sequences:
        say(
            f"nothing will be evaluated: no prompt fell into the held-out share of {settings.data.held_out}; "
            "more prompts or a larger share would help"
        )
    return trained, held_out
