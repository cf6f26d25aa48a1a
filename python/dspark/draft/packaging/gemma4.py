"""The Gemma 4 draft of DeepSpec: flat, with the switches beside the keys of the target's text config.

Every layer is a full one with the heads of the target's full layers, whatever `layer_types` and
`sliding_window` say.
"""

from __future__ import annotations

import dataclasses

from dspark.checkpoint.config_file import ConfigFile
from dspark.checkpoint.weights import WeightFiles
from dspark.draft.config import DraftConfig
from dspark.draft.gemma4.config import Gemma4DraftConfig
from dspark.draft.packaging.common import EMBEDDINGS, HEAD, read_backbone
from dspark.draft.packaging.heads import HeadDefaults
from dspark.draft.packaging.slots import drops_anchor_slot
from dspark.draft.packaging.switches import Switches
from dspark.errors import CheckpointError
from dspark.target.gemma4.config import read_heads_by_kind, read_softcap, refuse_variants
from dspark.target.gemma4.rotation import FULL, read_rotation

ARCHITECTURE = "Gemma4DSparkModel"
SHARED_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "attention_bias",
)
"""Keys that mean the same as in every other packaging."""


def has_gemma4_layers(weights: WeightFiles) -> bool:
    """Whether the layers have a scalar, as only Gemma 4's have."""
    return "layers.0.layer_scalar" in weights


def recognise(config: ConfigFile, weights: WeightFiles) -> bool:
    """By Gemma 4's layers, under this name or without a name."""
    if config.raw("dflash_config") is not None or not has_gemma4_layers(weights):
        return False
    return config.architectures() in ([], [ARCHITECTURE])


def read(config: ConfigFile, weights: WeightFiles) -> DraftConfig:
    """Reads a checkpoint that `recognise` accepts."""
    for name in (EMBEDDINGS, HEAD):
        if name not in weights:
            raise CheckpointError(
                f"{weights.where()}: tensor {name} is missing; a Gemma 4 draft has its own embeddings and "
                "output head"
            )
    refuse_variants(config)
    switches = Switches(config)
    taps = switches.integers("target_layer_ids")
    if taps is None or list(taps) != sorted(set(taps)):
        found = "missing" if taps is None else list(taps)
        raise CheckpointError(
            f"{config.path}: target_layer_ids must be a list that ascends in a Gemma 4 draft, found {found}"
        )
    heads = read_heads_by_kind(config, (FULL,) * config.integer("num_hidden_layers"))[FULL]
    body = {key: config.raw(key) for key in SHARED_KEYS}
    body |= {"head_dim": heads.head_dim, "num_key_value_heads": heads.num_key_value_heads}
    backbone = read_backbone(
        config,
        weights,
        packaging="gemma4",
        architecture=ARCHITECTURE,
        taps=taps,
        defaults=HeadDefaults(),
        drop_anchor_slot=drops_anchor_slot(switches, False),
        window_rule=None,
        body=ConfigFile(config.path, body),
    )
    known = {field.name: getattr(backbone, field.name) for field in dataclasses.fields(backbone)}
    known["rope"] = read_rotation(config, FULL)
    return Gemma4DraftConfig(
        **known, shared_values=heads.shared_values, final_logit_softcapping=read_softcap(config)
    )
