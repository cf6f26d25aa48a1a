"""Embeddings and output head of a target, found in its checkpoint without loading it."""

from __future__ import annotations

from pathlib import Path

from dspark.checkpoint.config_file import ConfigFile
from dspark.checkpoint.header import StoredTensor
from dspark.checkpoint.weights import WeightFiles
from dspark.draft.packaging.common import EMBEDDINGS, HEAD
from dspark.errors import CheckpointError

OTHER_TOWERS = ("visual", "vision", "audio", "mtp")


def borrowed_tensors(target: Path, shape: tuple[int, int]) -> dict[str, StoredTensor]:
    """`embed_tokens.weight` and `lm_head.weight` of the target in `target`, of `shape` (vocabulary, hidden).

    Raises:
        CheckpointError: not found, of another shape, or not usable as they are stored.
    """
    config = ConfigFile.read(target / "config.json")
    text = config.inside("text_config") or config
    if text.raw("final_logit_softcapping") is not None or "gemma" in str(text.raw("model_type")):
        raise CheckpointError(
            f"{config.path}: this target scales its embeddings or caps its logits, which embeddings and head "
            "stored in a draft cannot express"
        )
    for key in ("logit_scale", "logits_scaling"):
        if text.raw(key) not in (None, 1):
            raise CheckpointError(
                f"{text.path}: {text.prefix}{key} is {text.raw(key)!r}: this target scales its logits, which "
                "a head stored in a draft cannot express"
            )
    weights = WeightFiles.open(target)
    if biased := [name for name in weights.tensors if name.split(".")[-2:] == ["lm_head", "bias"]]:
        raise CheckpointError(
            f"{weights.where()}: this target's output head has a bias, {biased[0]}, which a head stored in a "
            "draft cannot have"
        )
    tied = config.flag("tie_word_embeddings", False) or text.flag("tie_word_embeddings", False)
    embeddings = _only(weights, EMBEDDINGS, shape)
    if embeddings is None:
        raise CheckpointError(f"{weights.where()}: no tensor {EMBEDDINGS}")
    head = embeddings if tied else _only(weights, HEAD, shape)
    if head is None:
        raise CheckpointError(
            f"{weights.where()}: tie_word_embeddings is false, but there is no tensor {HEAD}"
        )
    return {EMBEDDINGS: embeddings, HEAD: head}


def _only(weights: WeightFiles, name: str, shape: tuple[int, int]) -> StoredTensor | None:
    found = [
        stored
        for stored in weights.tensors
        if (stored == name or stored.endswith("." + name))
        and not any(tower in stored.split(".") for tower in OTHER_TOWERS)
    ]
    if len(found) > 1:
        raise CheckpointError(
            f"{weights.where()}: expected one tensor that can be the target's {name}, found "
            f"{', '.join(sorted(found))}"
        )
    return weights.check(found[0], shape) if found else None
