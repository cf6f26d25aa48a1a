"""Loading a hybrid target from a checkpoint directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dspark.checkpoint.load import load_parameters, on_meta, resolve_dtype
from dspark.checkpoint.untrained import warn_if_untrained
from dspark.checkpoint.weights import WeightFiles
from dspark.layers.norm import accumulation_dtype
from dspark.target.hybrid.config import HybridConfig
from dspark.target.hybrid.model import HybridTarget
from dspark.target.hybrid.modules import HybridDecays, HybridWeights
from dspark.target.hybrid.parameters import DECAY, hybrid_shapes, stored_names

if TYPE_CHECKING:
    from dspark.checkpoint.load import Progress


def load_hybrid(
    directory: Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype | str,
    progress: Progress | None,
) -> HybridTarget:
    """See `load_target`. Decays and the norms of the linear layers' heads stay in float32 where the model is
    in 16 bits."""
    config = HybridConfig.from_directory(directory)
    weights = WeightFiles.open(directory)
    names = stored_names(config, weights)
    for name, shape in hybrid_shapes(config).items():
        weights.check(names[name], shape)
    warn_if_untrained(weights, names.values())
    with on_meta():
        model, decays = HybridWeights(config), HybridDecays(config)
    place, element = torch.device(device), resolve_dtype(dtype, weights, names)
    small = {name: stored for name, stored in names.items() if name.endswith(_DECAY_ENDINGS)}
    load_parameters(
        decays,
        weights,
        {name.replace(".linear_attn.", "."): stored for name, stored in small.items()},
        place,
        accumulation_dtype(element),
    )
    if config.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    large = {name: stored for name, stored in names.items() if name not in small}
    load_parameters(model, weights, large, place, element, progress)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    return HybridTarget(config, model, decays)


_DECAY_ENDINGS = tuple(f".linear_attn.{name}" for name in DECAY)
