"""Before the first step: data, target, draft, the state of an earlier run, the teacher's states."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dspark.devices import parse_device, parse_dtype
from dspark.draft import DSparkDraftModel
from dspark.durations import duration
from dspark.errors import ConfigError
from dspark.pretrained import resolve
from dspark.target import load_target
from dspark.target.protocol import Target, TargetSizes
from dspark.text import Tokenizer
from dspark.train.before import check_first
from dspark.train.cache import StateCache, cache_bytes, check_size
from dspark.train.checkpoint import read_state
from dspark.train.create import draft_from, new_draft
from dspark.train.data.conversations import Conversation, fingerprint, frequent_tokens
from dspark.train.data.generate import LeftOut
from dspark.train.examples import StateSource
from dspark.train.gather import directories, gather, generate, is_generated, tokenizer_of
from dspark.train.head import check_head, embeddings_and_head, frozen_head
from dspark.train.identity import identity, named
from dspark.train.lock import held
from dspark.train.report import Say
from dspark.train.settings import Settings
from dspark.train.shape import draft_config, mask_token
from dspark.train.teacher import Teacher
from dspark.train.world import World, join


@dataclass(frozen=True, slots=True)
class Preflight:
    """What is known and has been checked before anything is generated."""

    path: Path
    tokenizer: Tokenizer | None
    sizes: TargetSizes
    target_content: str
    state: dict[str, Any] | None


def preflight(settings: Settings, world: World) -> Preflight:
    """Runs all checks that need no model.

    Raises:
        DSparkError: settings, data or a checkpoint are not usable, in one sentence.
    """
    state = read_state(settings.output)
    path = resolve(settings.target, "target")
    tokenizer = tokenizer_of(settings, path)
    sizes = check_first(settings, path, tokenizer, world.size, state)
    return Preflight(path, tokenizer, sizes, identity(path), state)


def generate_checked(settings: Settings, checked: Preflight, world: World, say: Say) -> list[Path]:
    """Generates what is missing, every process its share, after checking that a draft can be trained for the
    target. Returns the directories that hold what was asked for, once all of it is there."""
    left_out = LeftOut()
    if not is_generated(settings, world):
        # This target is not kept: the engine loads its own copy.
        check_head(
            load_target(checked.path, device=world.device, dtype=parse_dtype(settings.dtype)), checked.path
        )
        left_out = generate(settings, world, say)
    if given_up := left_out.of_all(world).said():  # waits for all processes
        say(f"generation gave up on {given_up}")
    return list(directories(settings).values())


def generate_only(settings: Settings, say: Say) -> list[Path]:
    """Generates what is missing, after refusing what training would refuse; see `generate_checked`."""
    with at_work(settings, say) as (world, talk):
        return generate_checked(settings, preflight(settings, world), world, talk)


@contextmanager
def at_work(settings: Settings, say: Say, world: World | None = None) -> Iterator[tuple[World, Say]]:
    """This process's place (`world`; None: as torchrun says, and closed at the end) and its `say`: only the
    main process reports, and it locks the run's directory for all of them.

    Raises:
        ConfigError: another run is at work there.
    """
    place = world or join(parse_device(settings.device))
    talk = say if place.is_main else _silent
    try:
        with held(settings.output, talk) if place.is_main else nullcontext():
            place.wait()  # no process writes before the directory is locked
            yield place, talk
    finally:
        if world is None:
            place.close()


def _silent(line: str) -> None:
    pass


@dataclass(slots=True)
class Prepared:
    """Everything that the first step needs."""

    world: World
    checked: Preflight
    target: Target
    draft: DSparkDraftModel
    trained: list[Conversation]
    held_out: list[Conversation]
    state: dict[str, Any] | None
    run: dict[str, Any]


def prepare(settings: Settings, world: World, say: Say) -> Prepared:
    """Data, target and draft, and the state of an earlier run with the same settings.

    Raises:
        DSparkError: settings, data or a checkpoint are not usable, in one sentence.
    """
    checked = preflight(settings, world)
    state, path, tokenizer = checked.state, checked.path, checked.tokenizer
    generated = generate_checked(settings, checked, world, say)
    trained, held_out = gather(settings, generated, tokenizer, checked.sizes, say)
    target = load_target(path, device=world.device, dtype=parse_dtype(settings.dtype))
    check_head(target, path)
    draft = _draft(settings, path, target, tokenizer, trained, state).to(world.device)
    run = {
        "curve": settings.curve(checked.target_content),
        "data": fingerprint([one.key() for one in trained]),
        "target_ids": None if draft.target_ids is None else draft.target_ids.tolist(),
        "mask_token_id": draft.config.mask_token_id,
    }
    _check_data(settings, state, run)
    step = 0 if state is None else state["run"]["progress"]["step"]
    if not world.agrees(json.dumps([step, run])):
        raise ConfigError(
            f"{settings.output}: the processes found different settings, conversations or checkpoints: the "
            "run's directory and data must be on a disk that all machines share, and the commands the same"
        )
    return Prepared(world, checked, target, draft, trained, held_out, state, run)


def _draft(
    settings: Settings,
    path: Path,
    target: Target,
    tokenizer: Tokenizer | None,
    trained: list[Conversation],
    state: dict[str, Any] | None,
) -> DSparkDraftModel:
    if settings.start is not None:
        return draft_from(resolve(settings.start, "draft"), path, settings.shape.training_block_size)
    shape = settings.shape
    if shape.mask_token_id is None:
        if state is not None:
            mask = state["run"]["mask_token_id"]
        else:
            mask = mask_token(tokenizer, {int(t) for one in trained for t in np.unique(one.tokens)})
        shape = dataclasses.replace(shape, mask_token_id=mask)
    config = draft_config(shape, target.config)
    ids = None
    if config.reduced:
        stored = None if state is None else state["run"]["target_ids"]
        found = frequent_tokens(trained, config.vocab_size, config.draft_vocab_size)
        ids = torch.tensor(stored) if stored is not None else torch.from_numpy(found)
    return new_draft(config, path, ids, settings.seed, settings.start_layers)


def _check_data(settings: Settings, state: dict[str, Any] | None, run: dict[str, Any]) -> None:
    if state is not None and not settings.accept_changes and state["run"]["data"] != run["data"]:
        raise ConfigError(
            f"{settings.output}: the run there was trained on other conversations: give --accept-changes or "
            "another directory"
        )


def teacher_of(ready: Prepared) -> Teacher:
    """The target as a teacher, with a head in float32 where its own computes in 16 bits."""
    config, target, head = ready.draft.config, ready.target, None
    if target.dtype.itemsize < 4 and not config.reduced:
        head = frozen_head(ready.draft)
    elif target.dtype.itemsize < 4:
        shape = (config.vocab_size, config.target_hidden_size)
        head = embeddings_and_head(ready.checked.path, shape, None)[1].to(ready.world.device)
    return Teacher(target, config.target_layer_ids, head)


def states_of(settings: Settings, ready: Prepared, teacher: Teacher, say: Say) -> StateSource:
    """Where the teacher's states come from: the target's own passes, or a cache that is filled first."""
    config = ready.draft.config
    directory = settings.data.cache
    if directory is None:
        return teacher
    said = {
        **named(settings.target, ready.checked.target_content),
        "taps": list(config.target_layer_ids),
        "dtype": str(ready.target.dtype),
        "normalisers": "float32",
        "keys": "tokens and answers",
    }
    world = ready.world
    taps, width = len(config.target_layer_ids), config.target_hidden_size
    cache = StateCache(directory, said, say)
    missing = cache.missing(ready.trained)
    whole_size, need = cache_bytes(ready.trained, taps, width), cache_bytes(missing, taps, width)
    say(
        f"hidden states take {whole_size / 1e9:.2f} GB in {directory}, of which {need / 1e9:.2f} GB are to "
        "be computed"
    )
    check_size(need, settings.data.cache_limit, directory)
    world.wait()  # all have seen the same cache, and divide what is missing
    cache.fill(missing[world.rank :: world.size], teacher, _progress(say))
    world.wait()
    return StateCache(directory, said, say)


def _progress(say: Say) -> Callable[[int, int], None]:
    started, said = time.monotonic(), [time.monotonic()]

    def show(done: int, total: int) -> None:
        now = time.monotonic()
        if now - said[0] >= 30 or done == total:
            said[0] = now
            left = (now - started) / done * (total - done)
            say(f"hidden states: {done:,} of {total:,} tokens, {duration(left)} left")

    return show
