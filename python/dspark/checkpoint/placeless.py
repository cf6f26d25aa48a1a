"""Tensors of layers that a config has no place for."""

from __future__ import annotations

from collections.abc import Collection

from dspark.checkpoint.weights import WeightFiles
from dspark.errors import CheckpointError

RECOMPUTED = "rotary_emb.inv_freq"
"""Stored by some checkpoints, although it follows from the config."""


def refuse_placeless(
    weights: WeightFiles, known: Collection[str], start: str, *, layers: int, biases: bool
) -> None:
    """Compares the layers' tensors, whose names begin with `start`, with those that are `known`.

    `layers` and `biases` are what the config says, for the message.

    Raises:
        CheckpointError: a layer holds a tensor that the config has no place for: without that tensor, the
            model would be a different one.
    """
    for name in sorted(weights.tensors):
        if name.startswith(start) and name not in known and not name.endswith(RECOMPUTED):
            raise CheckpointError(
                f"{weights.tensors[name].file}: holds tensor {name}, but the config has no place for it "
                f"({layers} layers, attention biases {str(biases).lower()})"
            )
