"""Loading a target from a checkpoint directory, by the code for its architecture."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dspark.checkpoint.config_file import ConfigFile
from dspark.devices import warn_if_slow
from dspark.layers.half import serves
from dspark.target.families import ADAPTER, family_of

if TYPE_CHECKING:
    from dspark.checkpoint.load import Progress
    from dspark.target.protocol import Target, TargetSizes


def load_target(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str = "auto",
    progress: Progress | None = None,
) -> Target:
    """Loads and freezes a target in the Hugging Face layout.

    Args:
        path: directory with config.json and safetensors weights, single or sharded.
        dtype: "auto" keeps the checkpoint's. A warning is logged where a CPU multiplies the dtype slowly,
            and the core does not do it instead.
        progress: called with bytes read so far and in all.

    Raises:
        CheckpointError: names the file, the key or tensor, what was expected and what was found.
    """
    directory = Path(path)
    family = family_of(ConfigFile.read(directory / "config.json"))
    target: Target = family.load(directory, device=device, dtype=dtype, progress=progress)
    if family is ADAPTER or not serves(target.dtype, target.device):
        warn_if_slow(str(directory), target.dtype, target.device)
    return target


def read_target_config(directory: Path) -> TargetSizes:
    """The configuration of the target in `directory`, as `load_target` would give it; no weights are read.

    Raises:
        CheckpointError: as `load_target`.
    """
    config = ConfigFile.read(directory / "config.json")
    return family_of(config).read(config)
