"""The nested packaging (SpecForge): switches under `dflash_config`, embeddings and output head from the
target.

Anchor-first, as DeepSpec's evaluation reads it: slot 0 predicts the first drafted token, unless
`sample_from_anchor` says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

from dspark.checkpoint.config_file import ConfigFile
from dspark.checkpoint.weights import WeightFiles
from dspark.draft.config import DraftConfig
from dspark.draft.packaging.common import read_backbone
from dspark.draft.packaging.flat import ARCHITECTURE as FLAT_ARCHITECTURE
from dspark.draft.packaging.heads import HeadDefaults
from dspark.draft.packaging.slots import (
    DFLASH_NAMES,
    DSPARK_ARCHITECTURE,
    drops_anchor_slot,
    is_plain_dflash,
)
from dspark.draft.packaging.speculators import is_speculators
from dspark.draft.packaging.switches import Switches
from dspark.errors import CheckpointError

# SpecForge's export for SGLang has the flat name, and keeps its `dflash_config`.
ARCHITECTURES = (DSPARK_ARCHITECTURE, *DFLASH_NAMES, FLAT_ARCHITECTURE)
DEFAULTS = HeadDefaults(markov_head_type="vanilla", confidence_head_with_markov=False)


def recognise(config: ConfigFile, weights: WeightFiles) -> bool:
    """By name, or without a name by a `dflash_config` that mentions DSpark's heads or projector."""
    if is_speculators(config) or is_plain_dflash(config, Switches(config)):
        return False
    has_block = config.raw("dflash_config") is not None
    seen = config.architectures()
    if FLAT_ARCHITECTURE in seen and not has_block:
        return False
    return all(name in ARCHITECTURES for name in seen) if seen else has_block


def read(config: ConfigFile, weights: WeightFiles) -> DraftConfig:
    """Reads a checkpoint that `recognise` accepts."""
    drop = drops_anchor_slot(Switches(config), False)
    return read_nested(config, weights, "nested", DSPARK_ARCHITECTURE, drop)


def read_nested(
    config: ConfigFile,
    weights: WeightFiles,
    packaging: str,
    architecture: str,
    drop_anchor_slot: bool,
    notes: Sequence[str] = (),
) -> DraftConfig:
    """What SpecForge's and z-lab's checkpoints have in common."""
    switches, notes = Switches(config), [*notes]
    taps = switches.integers("target_layer_ids")
    if taps is None:
        taps = default_taps(config, switches)
        notes.append(f"target_layer_ids is missing: {list(taps)} by the format's formula")
    return read_backbone(
        config,
        weights,
        packaging=packaging,
        architecture=architecture,
        taps=taps,
        defaults=DEFAULTS,
        drop_anchor_slot=drop_anchor_slot,
        notes=notes,
    )


def default_taps(config: ConfigFile, switches: Switches) -> tuple[int, ...]:
    """DFlash's formula: one tap per draft layer, evenly from layer 1 to the third from the end."""
    target_layers = switches.positive("num_target_layers")
    if target_layers is None:
        raise CheckpointError(
            f"{config.path}: target_layer_ids is missing, and without num_target_layers it has no default"
        )
    taps = config.integer("num_hidden_layers")
    if taps == 1:
        return (target_layers // 2,)
    span = target_layers - 4
    return tuple(round(1 + index * span / (taps - 1)) for index in range(taps))
