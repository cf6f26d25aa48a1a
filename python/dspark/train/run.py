"""`train`: from settings to a trained draft, resumed where an earlier run stopped."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dspark.errors import ConfigError
from dspark.serve.models import parse_device
from dspark.train.acceptance import HeldOut
from dspark.train.checkpoint import load_state, save_state
from dspark.train.create import trained_parameters
from dspark.train.loop import Loop, Progress
from dspark.train.optimiser import Optimiser, Rate
from dspark.train.prepare import Prepared, prepare, states_of, teacher_of
from dspark.train.report import Log, Say
from dspark.train.save import check_packaging, save_draft
from dspark.train.settings import SAVE_DTYPES, Settings
from dspark.train.step import Blocks, Stepper, loss_pass_of
from dspark.train.world import distribute, join, whole


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
        rate=Rate(settings.learning_rate, settings.pace.steps, settings.warmup, cooldown=settings.cooldown),
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
        teacher_of(ready),
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
            dtype=SAVE_DTYPES[settings.save_dtype],
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
