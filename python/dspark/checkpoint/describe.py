"""Describes a checkpoint without loading its weights."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.checkpoint import untrained
from dspark.checkpoint.config_file import ConfigFile
from dspark.checkpoint.unused import some_of, unused_tensors
from dspark.checkpoint.weights import WeightFiles

if TYPE_CHECKING:
    from dspark.draft.config import DraftConfig
    from dspark.target.config import TargetConfig


def inspect_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Describes a draft or a target: packaging, sizes, heads, taps, slots, parameters, dtypes, files,
    warnings.

    Only the config, the headers and the norm weights are read. The result can be written as JSON.

    Raises:
        CheckpointError: the checkpoint could not be loaded either; the message says why.
    """
    directory = Path(path)
    config = ConfigFile.read(directory / "config.json")
    if _is_target(config):
        return _target(directory, config)
    return _draft(directory, config)


def _is_target(config: ConfigFile) -> bool:
    from dspark.target.families import find_family

    seen = config.architectures()
    if seen:
        named = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in seen)
        return named or find_family(config) is not None
    # A draft without `architectures` may have the model_type of its target.
    drafting = ("target_layer_ids", "dflash_config", "block_size", "transformer_layer_config")
    return not any(config.raw(key) is not None for key in drafting)


def _target(directory: Path, file: ConfigFile) -> dict[str, Any]:
    from dspark.target.families import family_of

    family = family_of(file)
    weights = WeightFiles.open(directory)
    description = family.describe(file, weights)
    return {
        "role": "target",
        "path": str(directory),
        **description.facts,
        **_storage(weights, description.tensors, description.ignored),
        **({"ignored_tensors": description.ignored} if description.ignored else {}),
        "warnings": [*description.notes, *_warnings(weights, description.tensors, description.ignored)],
    }


def _draft(directory: Path, file: ConfigFile) -> dict[str, Any]:
    from dspark.draft.packaging import read_draft
    from dspark.draft.parameters import stored_parameters
    from dspark.draft.vocabulary import MASK, OFFSETS

    weights = WeightFiles.open(directory)
    config = read_draft(file, weights)
    names = {stored.name for stored in stored_parameters(config, weights).values()}
    # The map of a reduced vocabulary, and the mask that says the same.
    maps = {name: 1 for name in (OFFSETS, MASK) if config.reduced and name in weights.tensors}
    return {
        "role": "draft",
        "path": str(directory),
        "packaging": config.packaging,
        "architecture": config.architecture,
        "markov_head": {"type": config.markov_head_type, "rank": config.markov_rank},
        "confidence_head": {
            "present": config.enable_confidence_head,
            "with_markov": config.confidence_head_with_markov,
        },
        "taps": list(config.target_layer_ids),
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "training_block_size": config.training_block_size,
        "gamma": config.gamma,
        "drops_anchor_slot": config.drop_anchor_slot,
        "mask_token_id": config.mask_token_id,
        "own_embeddings": config.own_embeddings,
        "own_output_head": config.own_head,
        "draft_vocab_size": config.draft_vocab_size,
        "window_rule": config.window_rule if any(config.windows) else None,
        "causal": config.causal,
        **_soft_cap(config),
        **sizes(config),
        **_storage(weights, names, maps),
        "warnings": [*config.notes, *_warnings(weights, names, maps)],
    }


def _soft_cap(config: DraftConfig) -> dict[str, Any]:
    from dspark.draft.gemma4.config import Gemma4DraftConfig

    if not isinstance(config, Gemma4DraftConfig):
        return {}
    return {"final_logit_softcapping": config.final_logit_softcapping, "shared_values": config.shared_values}


def sizes(config: DraftConfig | TargetConfig) -> dict[str, Any]:
    """Sizes, rotation and windows that drafts and dense targets have."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "layers": config.num_hidden_layers,
        "attention_heads": config.num_attention_heads,
        "key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rope": dataclasses.asdict(config.rope),
        "sliding_windows": list(config.windows) if any(config.windows) else None,
    }


def _storage(weights: WeightFiles, names: set[str], ignored: dict[str, int]) -> dict[str, Any]:
    dtypes: dict[str, int] = {}
    for name in sorted(names):
        stored = weights.tensors[name]
        dtypes[stored.dtype] = dtypes.get(stored.dtype, 0) + stored.elements
    return {
        "parameters": sum(dtypes.values()),
        "tensors": len(names),
        "dtypes": dtypes,
        "files": [{"name": file.name, "bytes": file.stat().st_size} for file in weights.files],
        "unused_tensors": unused_tensors(weights, names, tuple(ignored)),
    }


def _warnings(weights: WeightFiles, names: set[str], ignored: dict[str, int]) -> list[str]:
    warnings = []
    extra = unused_tensors(weights, names, tuple(ignored))
    if extra:
        warnings.append(f"{len(extra)} tensors are not used: {some_of(extra)}")
    if untrained.looks_untrained(weights, names):
        warnings.append(untrained.WARNING)
    return warnings
