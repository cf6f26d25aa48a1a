"""Drafts in the packagings of speculators and of plain DFlash, and with a reduced vocabulary."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model_zoo import DRAFT, DRAFT_SWITCHES, VOCAB, nested_config

SOME = (0, 2, 3, 5, 7, 11, 12, 18, 25, 26, 31, 40, 41, 47, 55, 60)
"""Tokens of the zoo's vocabulary that a reduced draft knows."""

BODY = {key: value for key, value in DRAFT.items() if key not in ("block_size", "num_target_layers")}
INNER = ("layer_types", "sliding_window", "rope_theta", "attention_bias", *BODY)
HEADS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")


def speculators_config(kind: str = "dspark", **changes: Any) -> dict[str, Any]:
    """A speculators draft's config. Changes go to the layers' part where that has the key, else to the top
    level; a change to None removes the key."""
    body: dict[str, Any] = dict(BODY)
    top: dict[str, Any] = {
        "architectures": ["DSparkSpeculator" if kind == "dspark" else "DFlashSpeculator"],
        "speculators_model_type": kind,
        "speculators_config": {"algorithm": kind, "verifier": {"name_or_path": "somewhere"}},
        "block_size": DRAFT["block_size"],
        "mask_token_id": DRAFT_SWITCHES["mask_token_id"],
        "aux_hidden_state_layer_ids": [tap + 1 for tap in DRAFT_SWITCHES["target_layer_ids"]],
        "draft_vocab_size": VOCAB,
    }
    if kind == "dspark":
        top |= {key: DRAFT_SWITCHES[key] for key in HEADS} | {"sample_from_anchor": True}
    for key, value in changes.items():
        (body if key in INNER else top)[key] = value
    config = {"transformer_layer_config": {k: v for k, v in body.items() if v is not None}, **top}
    return {key: value for key, value in config.items() if value is not None}


def dflash_config(**changes: Any) -> dict[str, Any]:
    """A plain DFlash draft's config, as z-lab publishes them."""
    nothing = dict.fromkeys(("projector_type", *DRAFT_SWITCHES))
    kept = {key: DRAFT_SWITCHES[key] for key in ("mask_token_id", "target_layer_ids")}
    return nested_config({**nothing, **kept}, **{"architectures": ["DFlashDraftModel"], **changes})


def reduced(
    tensors: Mapping[str, Tensor], tokens: Sequence[int] = SOME, vocabulary: int = VOCAB
) -> dict[str, Tensor]:
    """The same draft for some tokens only, in that order: rows of output head and W2, and the maps."""
    ids = torch.tensor(tokens)
    mask = torch.zeros(vocabulary, dtype=torch.bool)
    mask[ids] = True
    fewer = ("lm_head.weight", "markov_head.markov_w2.weight")
    rows = {name: tensor[ids] if name in fewer else tensor for name, tensor in tensors.items()}
    return rows | {"d2t": ids - torch.arange(len(ids)), "t2d": mask}


def as_speculators(
    source: Path,
    output: Path,
    tokens: Sequence[int],
    vocabulary: int,
    own_head: Tensor | None = None,
    **changes: Any,
) -> Path:
    """A nested draft of `random_pair` in the speculators packaging, for some tokens only."""
    config = json.loads((source / "config.json").read_text())
    switches = config.pop("dflash_config")
    del switches["projector_type"], config["architectures"], config["num_target_layers"]
    top = {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "transformer_layer_config": config,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in switches.pop("target_layer_ids")],
        "draft_vocab_size": len(tokens),
        "block_size": config.pop("block_size"),
        **switches,
        **changes,
    }
    tensors = load_file(source / "model.safetensors")
    if own_head is not None:
        tensors["lm_head.weight"] = own_head
    tensors = reduced(tensors, tokens, vocabulary)
    output.mkdir(parents=True)
    (output / "config.json").write_text(json.dumps(top))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, output / "model.safetensors")
    return output
