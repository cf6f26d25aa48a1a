"""Loading and describing a Gemma 4 target."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from dspark.checkpoint.config_file import ConfigFile
from dspark.checkpoint.untrained import warn_if_untrained
from dspark.checkpoint.weights import WeightFiles
from dspark.target.families import Description, architecture_of, family_of
from dspark.target.gemma4.config import Gemma4Config
from dspark.target.gemma4.parameters import gemma4_shapes, left_out, stored_names

if TYPE_CHECKING:
    import torch

    from dspark.checkpoint.load import Progress
    from dspark.target.gemma4.model import Gemma4TargetModel


def read_gemma4(file: ConfigFile) -> Gemma4Config:
    """Reads the configuration of the architecture that the file names or its `model_type` implies."""
    return Gemma4Config.from_file(file, architecture_of(file, family_of(file)))


def load_gemma4(
    directory: Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype | str,
    progress: Progress | None,
) -> Gemma4TargetModel:
    """See `load_target`. Of a wrapped model, only the text part is loaded."""
    import torch

    from dspark.checkpoint.load import load_parameters, on_meta, resolve_dtype
    from dspark.target.gemma4.model import Gemma4TargetModel

    config = read_gemma4(ConfigFile.read(directory / "config.json"))
    weights = WeightFiles.open(directory)
    names = stored_names(config, weights)
    with on_meta():
        model = Gemma4TargetModel(config)
    element = resolve_dtype(dtype, weights, names)
    warn_if_untrained(weights, names.values())
    load_parameters(model, weights, names, torch.device(device), element, progress)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model.eval().freeze()


def describe_gemma4(file: ConfigFile, weights: WeightFiles) -> Description:
    """
    Raises:
        CheckpointError: the target cannot be loaded.
    """
    config = read_gemma4(file)
    names, shapes = stored_names(config, weights), gemma4_shapes(config)
    for name, stored in names.items():
        weights.check(stored, shapes[name])
    return Description(
        facts={
            "architecture": config.architecture,
            "tied_embeddings": config.tie_word_embeddings,
            "biases": {"qkv": config.attention_bias, "output": config.attention_bias, "mlp": False},
            "qk_norm": True,
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "layers": config.num_hidden_layers,
            "attention_heads": config.num_attention_heads,
            "heads_by_kind": {kind: dataclasses.asdict(sizes) for kind, sizes in config.heads.items()},
            "max_position_embeddings": config.max_position_embeddings,
            "rope_by_kind": {kind: dataclasses.asdict(rope) for kind, rope in config.ropes.items()},
            "sliding_windows": list(config.windows) if any(config.windows) else None,
            "final_logit_softcapping": config.final_logit_softcapping,
        },
        tensors=set(names.values()),
        ignored=left_out(weights),
    )
