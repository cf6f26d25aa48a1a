"""`train`: from settings to a trained draft, resumed where an earlier run stopped."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from dspark.train.acceptance import TEMPERATURES, HeldOut
from dspark.train.attention import why_not_flex
from dspark.train.checkpoint import load_state, load_weights, save_state
from dspark.train.create import trained_parameters
from dspark.train.data.conversations import evaluated
from dspark.train.head import frozen_head
from dspark.train.loop import Loop, Progress
from dspark.train.optimiser import Optimiser, Rate
from dspark.train.prepare import Prepared, at_work, prepare, states_of, teacher_of
from dspark.train.report import Log, Say, reports
from dspark.train.save import mend, packaging_of, save_draft
from dspark.train.settings import SAVE_DTYPES, Settings
from dspark.train.step import Blocks, Stepper, loss_pass_of
from dspark.train.teacher import Teacher
from dspark.train.world import World, distribute, whole


def train(settings: Settings, say: Say, world: World | None = None) -> dict[str, Any]:
    """Trains a draft, or resumes its training, and returns a summary of the run. The draft is in
    `output/draft`.

    Args:
        world: this process's place, which is not closed; None: as torchrun says, and closed at the end.

    Raises:
        DSparkError: settings, data or a checkpoint are not usable, in one sentence.
    """
    started = time.monotonic()
    with at_work(settings, say, world) as (place, talk):
        if place.is_main:
            mend(settings.output / "draft")
        return _train(settings, prepare(settings, place, talk), started, talk)


def _train(settings: Settings, ready: Prepared, started: float, say: Say) -> dict[str, Any]:
    at = Progress() if ready.state is None else Progress(**ready.state["run"]["progress"])
    if ready.state is not None and at.step >= settings.pace.steps:
        # The draft may be missing or older, if a kill came between the last state and the draft, or another
        # form may be asked for. If neither is so, nothing is written.
        load_weights(ready.state, ready.draft)
        _write_draft(settings, ready)
    else:
        at = _go_on(settings, ready, at, started, say)
    return {
        "draft": str(settings.output / "draft"),
        "steps": at.step,
        "of_steps": settings.pace.steps,
        "hours": at.seconds / 3600,
        "tokens": at.tokens,
        "skipped_steps": at.skipped,
        "finished": at.step >= settings.pace.steps,
        **_last_measured(settings.output),
    }


def _go_on(settings: Settings, ready: Prepared, at: Progress, started: float, say: Say) -> Progress:
    world, draft, config = ready.world, ready.draft, ready.draft.config
    teacher, head = teacher_of(ready), frozen_head(draft)
    source = states_of(settings, ready, teacher, say)
    attention = settings.attention
    if attention is None and (reason := why_not_flex(world.device, config.head_dim)) is not None:
        say(f"using torch's own attention: {reason}")
    loss_pass = loss_pass_of(draft, detach_confidence=settings.detach_confidence, attention=attention)
    module = distribute(loss_pass, loss_pass.training_pass, list(draft.layers), world, settings.parallel)
    optimiser = Optimiser(
        trained_parameters(draft),
        muon=settings.muon,
        muon_factor=settings.muon_factor,
        weight_decay=settings.weight_decay,
    )
    if ready.state is not None:
        load_state(ready.state, draft, optimiser)
        say(f"resuming at step {at.step:,} of {settings.pace.steps:,}")
    log = Log(settings.output, at.step, settings.tensorboard) if world.is_main else None
    held_out = _held_out(settings, ready, teacher, head)
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
        started=started,
        evaluate=lambda: (
            {}
            if held_out is None
            else held_out.measure(loss_pass.training_pass, config.block_size, settings.bf16)
        ),
        checkpoint=lambda progress: _checkpoint(settings, ready, optimiser, progress),
        log=log,
        say=say,
    )
    first = at.step
    with _stopping(loop):
        at = loop.run(at)
    if at.step == first > 0:  # no step, so no checkpoint; but the draft may be missing
        _write_draft(settings, ready)
    if log is not None:
        log.close()
    return at


def _held_out(settings: Settings, ready: Prepared, teacher: Teacher, head: Tensor) -> HeldOut | None:
    if not ready.held_out or settings.held_out_sequences == 0:
        return None
    return HeldOut(
        evaluated(ready.held_out, settings.held_out_sequences),
        teacher,
        head,
        anchors=settings.held_out_anchors,
        temperatures=TEMPERATURES,
        seed=settings.seed,
    )


def _checkpoint(settings: Settings, ready: Prepared, optimiser: Optimiser, at: Progress) -> None:
    """Writes the run's state first, then the draft that others read."""
    run = {**ready.run, "progress": dataclasses.asdict(at)}
    save_state(settings.output, ready.world, ready.draft, optimiser, run)
    _write_draft(settings, ready)


def _write_draft(settings: Settings, ready: Prepared) -> None:
    draft = ready.draft
    state = whole({name: parameter.detach() for name, parameter in draft.named_parameters()})
    if ready.world.is_main:
        save_draft(
            settings.output / "draft",
            draft.config,
            state,
            draft.target_ids,
            packaging=packaging_of(settings.packaging, draft.config.reduced),
            dtype=SAVE_DTYPES[settings.save_dtype],
            head=settings.save_head,
            target_name=settings.target,
        )
    ready.world.wait()


def _last_measured(output: Path) -> dict[str, Any]:
    """The latest results on held-out conversations, and their step (not the last one if the run stopped)."""
    measured = [one for one in reports(output) if "held_out" in one]
    last = measured[-1] if measured else {"step": None, "held_out": None}
    return {"held_out": last["held_out"], "held_out_step": last["step"]}


@contextmanager
def _stopping(loop: Loop) -> Iterator[None]:
    """Lets Ctrl-C and SIGTERM end the run after the current step, with a checkpoint; a second one at once."""
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
