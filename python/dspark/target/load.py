"""Loading a target from a checkpoint directory."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from dspark.checkpoint.load import Progress, load_parameters, resolve_dtype
from dspark.checkpoint.weights import WeightFiles
from dspark.target.config import TargetConfig
from dspark.target.model import TargetModel
from dspark.target.parameters import target_shapes


def load_target(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str = "auto",
    progress: Progress | None = None,
) -> TargetModel:
    """Loads and freezes a dense target in the Hugging Face layout.

    Args:
        path: directory with config.json and safetensors weights, single or sharded.
        dtype: "auto" keeps the checkpoint's.
        progress: called with bytes read so far and in all.

    Raises:
        CheckpointError: names the file, the key or tensor, what was expected and what was found.
    """
    directory = Path(path)
    config = TargetConfig.from_directory(directory)
    weights = WeightFiles.open(directory)
    with torch.device("meta"):
        model = TargetModel(config)
    names = {name: name for name in target_shapes(config, weights)}
    load_parameters(
        model, weights, names, torch.device(device), resolve_dtype(dtype, weights, names), progress
    )
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model.eval().freeze()
