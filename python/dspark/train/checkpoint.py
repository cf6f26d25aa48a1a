"""The state of a run on disk: written whole or not at all, so that a kill at any moment loses only the steps
after the last checkpoint."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dspark.errors import CheckpointError, ConfigError
from dspark.train.create import trained_parameters
from dspark.train.optimiser import Optimiser
from dspark.train.world import World, like, whole

FILE = "state.pt"


def save_state(
    directory: Path, world: World, draft: nn.Module, optimiser: Optimiser, run: dict[str, Any]
) -> None:
    """Trained weights and optimiser in full precision, and `run` (step, settings, vocabulary).

    Every process must call it; the main one writes.
    """
    state = {
        "draft": whole({name: p.detach() for name, p in trained_parameters(draft).items()}),
        "optimiser": whole(optimiser.state_dict()),
        "rng": torch.get_rng_state(),
        "run": run,
    }
    if world.is_main:
        directory.mkdir(parents=True, exist_ok=True)
        fresh, current = directory / (FILE + ".new"), directory / FILE
        with fresh.open("wb") as stream:
            torch.save(state, stream)
            stream.flush()
            os.fsync(stream.fileno())
        fresh.replace(current)
    world.wait()


def read_state(directory: Path) -> dict[str, Any] | None:
    """The last state, or None if there is none.

    Raises:
        CheckpointError: it is there and cannot be read.
    """
    file = directory / FILE
    if not file.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{file}: not a readable state of a run ({error})") from error
    return state


def load_weights(state: dict[str, Any], draft: nn.Module) -> None:
    """Puts the weights of a state of `read_state` into the draft, sharded as it is.

    Raises:
        CheckpointError: the state belongs to another draft.
    """
    parameters = trained_parameters(draft)
    shapes = {name: tuple(p.shape) for name, p in parameters.items()}
    stored = {name: tuple(value.shape) for name, value in state["draft"].items()}
    if shapes != stored:
        odd = sorted(n for n in shapes.keys() | stored.keys() if shapes.get(n) != stored.get(n))[0]
        raise CheckpointError(
            f"the run's state has {odd} of shape {stored.get(odd)}, but the draft's is {shapes.get(odd)}"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(like(state["draft"][name], parameter.data))


def load_state(state: dict[str, Any], draft: nn.Module, optimiser: Optimiser) -> None:
    """Puts a state of `read_state` into draft and optimiser, sharded as they are.

    Raises:
        CheckpointError: the state belongs to another draft.
        ConfigError: it belongs to another optimiser.
    """
    load_weights(state, draft)
    if len(state["optimiser"]) != len(optimiser.parts):
        raise ConfigError("the run's state is for another optimiser: the choice of Muon (--muon) has changed")
    for part, saved in zip(optimiser.parts, state["optimiser"], strict=True):
        _shard(part, saved)
    optimiser.load_state_dict(state["optimiser"])
    torch.set_rng_state(state["rng"])


def _shard(optimiser: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    for index, values in saved["state"].items():
        sample = parameters[index].data
        saved["state"][index] = {
            key: like(value, sample) if value.shape == sample.shape else value
            for key, value in values.items()
        }
