"""Refusals of weights that transformers would load silently although the model needs others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dspark.checkpoint.weights import FLOATS, WeightFiles
from dspark.errors import CheckpointError

MOVED_BUFFERS = (r"(^|\.)position_ids$",)
"""Buffers that older versions of transformers stored and newer ones compute."""


def require_every_weight(weights: WeightFiles, model: Any, info: Mapping[str, Any]) -> None:
    """Refuses tensors that are missing or of another shape, which transformers would draw at random.

    Args:
        info: what `from_pretrained` reports about its loading.
    """
    for entry in info["mismatched_keys"]:
        name = entry if isinstance(entry, str) else entry[0]  # some versions add both shapes
        expected, found = list(model.state_dict()[name].shape), weights.shape(name)
        raise CheckpointError(
            f"{weights.where()}: tensor {name} has the wrong shape, expected {expected}, "
            f"found {'another' if found is None else list(found)}"
        )
    for name in sorted(info["missing_keys"]):
        raise CheckpointError(f"{weights.where()}: tensor {name} is missing")


def require_floats(weights: WeightFiles, model: Any, info: Mapping[str, Any]) -> None:
    """Refuses quantised weights, which transformers would convert like any others, without their scales. What
    the model does not use, or computes itself, may be stored in any dtype."""
    spared = [*info["unexpected_keys"], *(name for name, _ in model.named_buffers())]
    patterns = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), *MOVED_BUFFERS]
    for name, stored in sorted(weights.tensors.items()):
        if stored.dtype in FLOATS or any(_is_same(name, other) for other in spared):
            continue
        if not any(re.search(pattern, name) for pattern in patterns):
            weights.check(name, stored.shape)


def _is_same(one: str, other: str) -> bool:
    """Whether two names are the same but for what a wrapper puts before one of them."""
    return f".{one}".endswith(f".{other}") or f".{other}".endswith(f".{one}")
