"""Loading and describing the dense targets: Llama, Qwen2, Qwen3."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dspark.checkpoint.config_file import ConfigFile
from dspark.checkpoint.describe import sizes
from dspark.checkpoint.untrained import warn_if_untrained
from dspark.checkpoint.weights import WeightFiles
from dspark.target.config import TargetConfig
from dspark.target.families import Description
from dspark.target.parameters import target_shapes

if TYPE_CHECKING:
    import torch

    from dspark.checkpoint.load import Progress
    from dspark.target.model import TargetModel


def load_dense(
    directory: Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype | str,
    progress: Progress | None,
) -> TargetModel:
    """See `load_target`."""
    import torch

    from dspark.checkpoint.load import ParameterReader, on_meta, resolve_dtype
    from dspark.target.model import TargetModel

    config = TargetConfig.from_directory(directory)
    weights = WeightFiles.open(directory)
    with on_meta():
        model = TargetModel(config)
    names = {name: name for name in target_shapes(config, weights)}
    element = resolve_dtype(dtype, weights, names)
    warn_if_untrained(weights, names)
    reader = ParameterReader(model, weights, names, torch.device(device), element, progress)
    reader.vectors()  # norms are needed first, and embeddings determine device and dtype
    reader.fill("model.embed_tokens.")
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model.eval().freeze(reader.fill)


def describe_dense(config: ConfigFile, weights: WeightFiles) -> Description:
    """
    Raises:
        CheckpointError: the target cannot be loaded.
    """
    read = TargetConfig.from_file(config)
    names = target_shapes(read, weights)
    for name, shape in names.items():
        weights.check(name, shape)
    return Description(
        {
            "architecture": read.architecture,
            "tied_embeddings": read.tie_word_embeddings,
            "biases": {"qkv": read.qkv_bias, "output": read.output_bias, "mlp": read.mlp_bias},
            "qk_norm": read.qk_norm,
            **sizes(read),
        },
        set(names),
    )
