"""Writing a trained draft as a checkpoint that any loader of its packaging takes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from dspark.draft.config import DraftConfig
from dspark.draft.export import configs
from dspark.draft.packaging import read_draft_directory
from dspark.draft.vocabulary import MASK, OFFSETS
from dspark.errors import ConfigError
from dspark.train.create import FROZEN

PACKAGINGS = ("flat", "nested", "speculators")


def save_draft(
    directory: Path,
    config: DraftConfig,
    state: Mapping[str, Tensor],
    target_ids: Tensor | None,
    *,
    packaging: str,
    dtype: torch.dtype = torch.bfloat16,
    head: bool = True,
    target_name: str | None = None,
) -> None:
    """Writes config.json and model.safetensors, both or none: an older checkpoint there stays whole until the
    new one is.

    Args:
        state: the draft's parameters by published names, embeddings and head included.
        packaging: "flat" (embeddings and head are stored), "nested" (neither is), or "speculators", the one
            with a reduced vocabulary.
        head: whether "speculators" stores the head's rows; without, the loader takes them from the target,
            which dspark does and other engines may not. "flat" always does, "nested" never.
        target_name: what the configuration calls the target ("speculators").
    """
    check_packaging(packaging, config.reduced, head)
    left_out = {"flat": (), "nested": FROZEN, "speculators": FROZEN[:1] if head else FROZEN}[packaging]
    tensors = {
        name: tensor.detach().to("cpu", dtype).contiguous()
        for name, tensor in state.items()
        if not name.startswith(left_out)
    }
    if packaging == "speculators" and target_ids is not None:
        tokens = target_ids.cpu().numpy().astype(np.int64)
        mask = np.zeros(config.vocab_size, np.bool_)
        mask[tokens] = True
        tensors[OFFSETS] = torch.from_numpy(tokens - np.arange(len(tokens)))
        tensors[MASK] = torch.from_numpy(mask)
    values: dict[str, Any] = {
        "flat": lambda: configs.flat(config),
        "nested": lambda: configs.nested(config),
        "speculators": lambda: configs.speculators(config, target_name),
    }[packaging]()
    values["dtype"] = str(dtype).removeprefix("torch.")
    fresh = directory.with_name(directory.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    save_file(tensors, fresh / "model.safetensors", metadata={"format": "pt"})
    (fresh / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    # The library makes its file private; a checkpoint is as readable as its configuration.
    (fresh / "model.safetensors").chmod((fresh / "config.json").stat().st_mode)
    read_draft_directory(fresh)  # what cannot be read back does not replace what can
    _replace(fresh, directory)


def packaging_of(asked: str | None, reduced: bool) -> str:
    """What is asked for, else the one that fits the vocabulary."""
    return asked or ("speculators" if reduced else "flat")


def check_packaging(packaging: str, reduced: bool, head: bool) -> None:
    """
    Raises:
        ConfigError: an unknown packaging, or one that cannot hold a reduced vocabulary or leave its head out.
    """
    if packaging not in PACKAGINGS:
        raise ConfigError(f"packaging must be one of {', '.join(PACKAGINGS)}, not {packaging!r}")
    if reduced and packaging != "speculators":
        raise ConfigError(
            f"the packaging {packaging} has no draft vocabulary of its own: a reduced one needs speculators"
        )
    if packaging == "flat" and not head:
        raise ConfigError("the packaging flat stores its head: to leave that out (lean), choose another one")


def _replace(fresh: Path, directory: Path) -> None:
    """Puts `fresh` in the place of `directory`; a crash between the two renames leaves the old one beside."""
    for file in fresh.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    old = directory.with_name(directory.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if directory.exists():
        directory.rename(old)
    fresh.rename(directory)
    shutil.rmtree(old, ignore_errors=True)
