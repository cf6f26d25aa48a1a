"""Measurements on disk, one small file for each pair, device and way of running."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import torch

import dspark
from dspark.attention.workers import parallel_region
from dspark.errors import CheckpointError
from dspark.files import write_whole
from dspark.pretrained import cache_root
from dspark.serve.costs.device import device_name
from dspark.serve.costs.record import Costs
from dspark.serve.models import Models

FORMAT = 4
"""Increased whenever the files or the way of measuring change."""

_log = logging.getLogger("dspark")

Key = dict[str, Any]


def cost_key(models: Models, block_size: int, candidates: int | None) -> Key:
    """Everything that costs depend on. Models are identified by what their passes run, not by their paths."""
    target, draft = models.paths
    return {
        "format": FORMAT,
        "dspark": dspark.__version__,
        "torch": torch.__version__,
        "device": device_name(models.target.device),
        "threads": torch.get_num_threads(),
        "attention_has_threads": parallel_region() != 0,
        "kernels": _kernels(models),
        "target_runs_through": models.target.runs_through,
        "target": _identity(target),
        "draft": None if draft is None else _identity(draft),
        "dtype": str(models.target.dtype),
        "draft_dtype": None if models.draft is None else str(models.draft.dtype),
        "block_size": block_size,
        "markov_candidates": candidates,
    }


def _kernels(models: Models) -> dict[str, str]:
    """What kernels do in these models' rounds, and what they are compiled for. Roles without kernels are left
    out with their reasons: a round takes equally long for every reason."""
    used = {role: how for role, how in models.roles.items() if how.startswith("kernel")}
    if used and (kernels := models.kernels.kernels) is not None:
        used["compiled for"] = f"{kernels.architecture} by NVRTC {kernels.nvrtc}"
    return used


def cost_file(key: Key) -> Path:
    """Where the costs of this key are kept."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_root() / "costs" / f"{digest[:24]}.json"


def load(key: Key) -> Costs | None:
    """Kept costs, if there are any.

    A file that cannot be used only causes a warning on the logger `dspark`.
    """
    try:
        path = cost_file(key)
    except CheckpointError:  # no place for a cache
        return None
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["key"] != key:
            raise ValueError("it belongs to another pair or machine")
        return Costs.from_json(kept["costs"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception as error:  # a damaged file can fail in many ways, all with the same remedy
        _log.warning("the cost table in %s cannot be used, so costs are measured again: %s", path, error)
        return None


def store(key: Key, costs: Costs) -> Path | None:
    """Keeps costs, whole or not at all; `None` where the cache cannot be written."""
    try:
        path = cost_file(key)
    except CheckpointError as error:
        _log.info("the cost table cannot be kept: %s", error)
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({"key": key, "costs": costs.to_json()}))
    except OSError as error:
        _log.info("the cost table cannot be kept in %s: %s", path, error)
        return None
    return path


def _identity(directory: Path) -> str:
    """A digest of a model's configuration and of its weights' names, shapes and dtypes, which say what its
    passes run; the weights themselves do not matter."""
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*")):
        if path.name == "config.json":
            digest.update(path.read_bytes())
        elif path.suffix == ".safetensors":
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                digest.update(f"{path.name} {path.stat().st_size} ".encode())
                digest.update(file.read(min(size, 1 << 27)))
    return digest.hexdigest()[:24]
