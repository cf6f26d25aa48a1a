"""`train`: from settings to a trained draft, resumed where an earlier run stopped."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dspark.draft import DSparkDraftModel
from dspark.errors import ConfigError
from dspark.pretrained import resolve
from dspark.serve.models import parse_device, parse_dtype
from dspark.target import load_target
from dspark.target.protocol import Target
from dspark.text import Tokenizer
from dspark.train.acceptance import HeldOut
from dspark.train.cache import StateCache, cache_bytes, check_size
from dspark.train.checkpoint import load_state, read_state, save_state
from dspark.train.create import draft_from, new_draft, trained_parameters
from dspark.train.data.conversations import Conversation, frequent_tokens
from dspark.train.examples import StateSource
from dspark.train.gather import gather, generate
from dspark.train.loop import Loop, Progress
from dspark.train.optimiser import Optimiser, Rate
from dspark.train.report import Log, Say, duration
from dspark.train.save import check_packaging, save_draft
from dspark.train.settings import Settings, fingerprint
from dspark.train.shape import draft_config, mask_token
from dspark.train.step import Blocks, Stepper, loss_pass_of
from dspark.train.teacher import Teacher
from dspark.train.world import World, distribute, join, whole

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(slots=True)
class Prepared:
    """Everything before the first step."""

    world: World
    target_path: Path
    target: Target
    draft: DSparkDraftModel
    trained: list[Conversation]
    held_out: list[Conversation]
    state: dict[str, Any] | None
    run: dict[str, Any]


def train(settings: Settings, say: Say) -> dict[str, Any]:
    """Trains, or goes on training, and returns what the run amounts to. The draft is in `output/draft`.

    Raises:
        DSparkError: settings, data or a checkpoint are not usable, in one sentence.
    """
    world = join(parse_device(settings.device))
    talk = say if world.is_main else _silent
    try:
        return _train(settings, prepare(settings, world, talk), talk)
    finally:
        world.close()


def _silent(line: str) -> None:
    pass


def prepare(settings: Settings, world: World, say: Say) -> Prepared:
    """Data, target and draft, and the state of an earlier run with the same settings."""
    state = read_state(settings.output)
    # Generation is one process's work, the others read what it wrote.
    generated = generate(settings, say) if world.is_main else []
    world.wait()
    if not world.is_main:
        generated = generate(settings, say)
    path = resolve(settings.target, "target")
    has_tokenizer = (path / "tokenizer.json").exists()
    tokenizer = Tokenizer.from_directory(path) if has_tokenizer else None
    trained, held_out = gather(settings, generated, tokenizer, say)
    target = load_target(path, device=world.device, dtype=parse_dtype(settings.dtype))
    draft = _draft(settings, path, target, tokenizer, trained, state).to(world.device)
    run = {
        "curve": settings.curve(),
        "data": fingerprint([one.key() for one in trained]),
        "target_ids": None if draft.target_ids is None else draft.target_ids.tolist(),
        "mask_token_id": draft.config.mask_token_id,
    }
    _check_resumable(settings, state, run)
    return Prepared(world, path, target, draft, trained, held_out, state, run)


def _draft(
    settings: Settings,
    path: Path,
    target: Target,
    tokenizer: Tokenizer | None,
    trained: list[Conversation],
    state: dict[str, Any] | None,
) -> DSparkDraftModel:
    if settings.start is not None:
        return draft_from(resolve(settings.start, "draft"), path)
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
    return new_draft(config, path, ids, settings.seed)


def _check_resumable(settings: Settings, state: dict[str, Any] | None, run: dict[str, Any]) -> None:
    if state is None or settings.accept_changes:
        return
    old, new = state["run"]["curve"], run["curve"]
    odd = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    if odd:
        raise ConfigError(
            f"{settings.output}: the run there has {odd[0]} {old.get(odd[0])!r}, and {new.get(odd[0])!r} is "
            "asked for: accept changes, or name another directory"
        )
    if state["run"]["data"] != run["data"]:
        raise ConfigError(
            f"{settings.output}: the run there was trained on other conversations: accept changes, or name "
            "another directory"
        )


def states_of(settings: Settings, ready: Prepared, say: Say) -> StateSource:
    """The teacher's states: the target's own passes, or a cache that is filled first."""
    config = ready.draft.config
    teacher = Teacher(ready.target, config.target_layer_ids)
    directory = settings.data.cache
    if directory is None:
        return teacher
    said = {
        "target": settings.target,
        "taps": list(config.target_layer_ids),
        "dtype": str(ready.target.dtype),
    }
    if ready.world.is_main:
        cache = StateCache(directory, said)
        missing = cache.missing(ready.trained)
        whole_size = cache_bytes(ready.trained, len(config.target_layer_ids), config.target_hidden_size)
        need = cache_bytes(missing, len(config.target_layer_ids), config.target_hidden_size)
        say(
            f"hidden states take {whole_size / 1e9:.2f} GB in {directory}, of which {need / 1e9:.2f} GB are "
            "to be computed"
        )
        check_size(whole_size, settings.data.cache_limit, directory)
        cache.fill(ready.trained, teacher, _progress(say))
    ready.world.wait()
    return StateCache(directory, said)


def _progress(say: Say) -> Callable[[int, int], None]:
    import time

    started, said = time.monotonic(), [time.monotonic()]

    def show(done: int, total: int) -> None:
        now = time.monotonic()
        if now - said[0] >= 30 or done == total:
            said[0] = now
            left = (now - started) / done * (total - done)
            say(f"hidden states: {done:,} of {total:,} tokens, {duration(left)} left")

    return show


def _train(settings: Settings, ready: Prepared, say: Say) -> dict[str, Any]:
    world, draft, config = ready.world, ready.draft, ready.draft.config
    packaging = settings.packaging or ("speculators" if config.reduced else "flat")
    check_packaging(packaging, config.reduced)
    if settings.pace.sequences % world.size:
        raise ConfigError(
            f"{settings.pace.sequences} sequences a step cannot be shared by {world.size} processes"
        )
    source = states_of(settings, ready, say)
    attention = settings.attention
    loss_pass = loss_pass_of(draft, detach_confidence=settings.detach_confidence, attention=attention)
    module = distribute(loss_pass, loss_pass.training_pass, list(draft.layers), world, settings.parallel)
    optimiser = Optimiser(
        trained_parameters(draft),
        muon=settings.muon,
        muon_factor=settings.muon_factor,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
    )
    at = Progress()
    if ready.state is not None:
        load_state(ready.state, draft, optimiser)
        at = Progress(**ready.state["run"]["progress"])
        say(f"goes on at step {at.step:,} of {settings.pace.steps:,}")
    log = Log(settings.output, at.step, settings.tensorboard) if world.is_main else None
    held = _held_out(settings, ready)
    loop = Loop(
        Stepper(
            module,
            loss_pass,
            source,
            world,
            blocks=Blocks(
                settings.anchors, config.training_block_size, settings.failed_anchors, settings.context_noise
            ),
            goal=settings.goal,
            micro_batch=settings.micro_batch,
            bf16=settings.bf16,
            seed=settings.seed,
        ),
        optimiser,
        ready.trained,
        world,
        pace=settings.pace,
        rate=Rate(settings.learning_rate, settings.pace.steps, settings.warmup),
        clip=settings.clip,
        seed=settings.seed,
        evaluate=lambda: (
            {} if held is None else held.measure(loss_pass.training_pass, config.block_size, settings.bf16)
        ),
        checkpoint=lambda progress: _checkpoint(settings, ready, optimiser, packaging, progress),
        log=log,
        say=say,
    )
    with _stopping(loop):
        at = loop.run(at)
    if log is not None:
        log.close()
    return {
        "draft": str(settings.output / "draft"),
        "steps": at.step,
        "of_steps": settings.pace.steps,
        "hours": at.seconds / 3600,
        "tokens": at.tokens,
        "finished": at.step >= settings.pace.steps,
        "held_out": _last_measured(settings.output),
    }


def _held_out(settings: Settings, ready: Prepared) -> HeldOut | None:
    if not ready.held_out or settings.held_out_sequences == 0:
        return None
    head = ready.draft.lm_head
    if head is None:
        raise ConfigError("a draft in training has a head of its own")
    return HeldOut(
        ready.held_out[: settings.held_out_sequences],
        Teacher(ready.target, ready.draft.config.target_layer_ids),
        whole(head.weight.detach()),
        anchors=settings.held_out_anchors,
        temperatures=settings.temperatures,
        seed=settings.seed,
    )


def _checkpoint(
    settings: Settings, ready: Prepared, optimiser: Optimiser, packaging: str, at: Progress
) -> None:
    """The run's state first, the draft that others read after it."""
    progress = {"step": at.step, "seconds": at.seconds, "tokens": at.tokens}
    draft = ready.draft
    save_state(settings.output, ready.world, draft, optimiser, {**ready.run, "progress": progress})
    state = whole({name: parameter.detach() for name, parameter in draft.named_parameters()})
    if ready.world.is_main:
        save_draft(
            settings.output / "draft",
            draft.config,
            state,
            draft.target_ids,
            packaging=packaging,
            dtype=DTYPES[settings.save_dtype],
            head=settings.save_head,
            target_name=settings.target,
        )
    ready.world.wait()


def _last_measured(output: Path) -> dict[str, Any] | None:
    file = output / "log.jsonl"
    if not file.exists():
        return None
    found = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    measured = [one["held_out"] for one in found if "held_out" in one]
    return measured[-1] if measured else None


@contextmanager
def _stopping(loop: Loop) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the run after its step, with a checkpoint; a second one at once."""
    if os.name != "posix":
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)

    def stop(number: int, frame: Any) -> None:
        if loop.stop:
            raise KeyboardInterrupt
        loop.stop = True

    try:
        old = {number: signal.signal(number, stop) for number in numbers}
    except ValueError:  # not the main thread: whoever owns the signals decides
        yield
        return
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
