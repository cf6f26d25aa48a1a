"""Writing a trained draft as a checkpoint that any loader of its packaging takes."""

from __future__ import annotations

import filecmp
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from dspark.checkpoint.calibration import FILE_NAME
from dspark.checkpoint.load import read_tensor
from dspark.draft.config import DraftConfig
from dspark.draft.export import configs
from dspark.draft.packaging import read_draft_directory
from dspark.draft.parameters import stored_parameters
from dspark.draft.vocabulary import MASK, OFFSETS
from dspark.errors import CheckpointError, ConfigError
from dspark.files import sync
from dspark.train.create import FROZEN


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
    """Writes config.json and model.safetensors, both or neither: an older checkpoint there stays until the
    new one is complete, and is not touched if it is the same. Its calibration.json is kept if only the form
    of the weights changes.

    Args:
        state: the draft's parameters by published names, embeddings and head included.
        packaging: "flat" (embeddings and head are stored), "nested" (neither is), or "speculators", the only
            one for a reduced vocabulary.
        head: whether "speculators" stores the head's rows; if not, the loader has to take them from the
            target, as dspark does and other engines may not. "flat" always stores them, "nested" never.
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
    values = configs.written(config, packaging, target_name)
    values["dtype"] = str(dtype).removeprefix("torch.")
    fresh = _beside(directory, "new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    save_file(tensors, fresh / "model.safetensors", metadata={"format": "pt"})
    (fresh / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    # The library makes its file private; a checkpoint should be as readable as its configuration.
    (fresh / "model.safetensors").chmod((fresh / "config.json").stat().st_mode)
    read_draft_directory(fresh)  # an unreadable draft must not replace a readable one
    if _same_files(fresh, directory):
        shutil.rmtree(fresh)
        return
    fitted = directory / FILE_NAME
    if fitted.exists() and _same_weights(directory, config, state):
        shutil.copy2(fitted, fresh)
    _replace(fresh, directory)


def _same_files(fresh: Path, directory: Path) -> bool:
    names = [file.name for file in fresh.iterdir()]
    return not any(filecmp.cmpfiles(fresh, directory, names, shallow=False)[1:])


def _same_weights(directory: Path, config: DraftConfig, state: Mapping[str, Tensor]) -> bool:
    """Whether a draft in `directory` has the same block size and stores `state`, in any form or precision."""
    try:
        old, weights = read_draft_directory(directory)
        stored = stored_parameters(old, weights)
        was = {name: read_tensor(one) for name, one in stored.items() if not name.startswith(FROZEN)}
    except CheckpointError:
        return False
    return old.block_size == config.block_size and all(
        name in state and torch.equal(value, state[name].detach().to("cpu", value.dtype))
        for name, value in was.items()
    )


def packaging_of(asked: str | None, reduced: bool) -> str:
    """The packaging that was asked for, else the one that fits the vocabulary."""
    return asked or ("speculators" if reduced else "flat")


def check_packaging(packaging: str, reduced: bool, head: bool) -> None:
    """
    Raises:
        ConfigError: an unknown packaging, or one that cannot hold a reduced vocabulary or leave its head out.
    """
    if packaging not in configs.FORMATS:
        raise ConfigError(f"packaging must be one of {', '.join(configs.FORMATS)}, not {packaging!r}")
    if reduced and packaging != "speculators":
        raise ConfigError(
            f"the packaging {packaging} cannot hold a reduced draft vocabulary, which needs speculators"
        )
    if packaging == "flat" and not head:
        raise ConfigError("the packaging flat always stores the head: leave out --lean, or choose another")


def _replace(fresh: Path, directory: Path) -> None:
    """Puts `fresh` in the place of `directory`; after a crash between the two renames, `mend` does so."""
    for file in fresh.iterdir():
        sync(file)
    old = _beside(directory, "old")
    shutil.rmtree(old, ignore_errors=True)
    if directory.exists():
        directory.rename(old)
    fresh.rename(directory)
    shutil.rmtree(old, ignore_errors=True)


def mend(directory: Path) -> None:
    """Finishes a `_replace` that crashed between its two renames: the new draft was complete by then."""
    fresh, old = _beside(directory, "new"), _beside(directory, "old")
    if not directory.exists() and old.exists():
        (fresh if fresh.exists() else old).rename(directory)
        shutil.rmtree(old, ignore_errors=True)


def _beside(directory: Path, kind: str) -> Path:
    return directory.with_name(f"{directory.name}.{kind}")
