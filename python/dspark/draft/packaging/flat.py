"""The flat packaging (DeepSpec): every switch at top level, own embeddings and output head.

Anchor-first unless it says otherwise, also where it holds a plain block drafter (`dflash_*_block7`:
`markov_rank` 0). Neither its training mask nor its evaluation applies a window.
"""

from __future__ import annotations

from dspark.checkpoint.config_file import ConfigFile
from dspark.checkpoint.weights import WeightFiles
from dspark.draft.config import DraftConfig
from dspark.draft.packaging.common import EMBEDDINGS, HEAD, read_backbone
from dspark.draft.packaging.gemma4 import has_gemma4_layers
from dspark.draft.packaging.heads import HeadDefaults
from dspark.draft.packaging.slots import drops_anchor_slot
from dspark.draft.packaging.speculators import is_speculators
from dspark.draft.packaging.switches import Switches
from dspark.errors import CheckpointError

ARCHITECTURE = "Qwen3DSparkModel"


def recognise(config: ConfigFile, weights: WeightFiles) -> bool:
    """By name, or without a name by taps at top level, no `dflash_config` and own embeddings."""
    if config.raw("dflash_config") is not None or is_speculators(config) or has_gemma4_layers(weights):
        return False
    seen = config.architectures()
    if seen:
        return seen == [ARCHITECTURE]
    return config.raw("target_layer_ids") is not None and EMBEDDINGS in weights


def read(config: ConfigFile, weights: WeightFiles) -> DraftConfig:
    """Reads a checkpoint that `recognise` accepts."""
    for name in (EMBEDDINGS, HEAD):
        if name not in weights:
            raise CheckpointError(
                f"{weights.where()}: tensor {name} is missing; the flat format has its own embeddings and "
                "output head"
            )
    switches = Switches(config)
    taps = switches.integers("target_layer_ids")
    if taps is None:
        raise CheckpointError(
            f"{config.path}: target_layer_ids is missing, and the flat format has no default"
        )
    if list(taps) != sorted(set(taps)):
        raise CheckpointError(f"{config.path}: target_layer_ids {list(taps)} must ascend in the flat format")
    return read_backbone(
        config,
        weights,
        packaging="flat",
        architecture=ARCHITECTURE,
        taps=taps,
        defaults=HeadDefaults(),
        drop_anchor_slot=drops_anchor_slot(switches, False),
        window_rule=None,
    )
