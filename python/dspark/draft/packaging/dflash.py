"""The plain DFlash packaging (z-lab): taps and mask under `dflash_config`, embeddings and output head from
the target, slot 0 dropped.

The anchor's own slot predicts nothing, so a block of `block_size` inputs gives `block_size` - 1 drafts.
DeepSpec's own DFlash baselines (`dflash_*_block7`) are anchor-first and come in the flat packaging.
"""

from __future__ import annotations

from dspark.checkpoint.config_file import ConfigFile
from dspark.checkpoint.weights import WeightFiles
from dspark.draft.config import DraftConfig
from dspark.draft.packaging import nested
from dspark.draft.packaging.slots import (
    DFLASH_ARCHITECTURE,
    UNSAID,
    is_plain_dflash,
    says_anchor_predicts,
)
from dspark.draft.packaging.speculators import is_speculators
from dspark.draft.packaging.switches import Switches


def recognise(config: ConfigFile, weights: WeightFiles) -> bool:
    """See `is_plain_dflash`."""
    return not is_speculators(config) and is_plain_dflash(config, Switches(config))


def read(config: ConfigFile, weights: WeightFiles) -> DraftConfig:
    """Reads a checkpoint that `recognise` accepts."""
    switches = Switches(config)
    said = says_anchor_predicts(switches)
    notes = [UNSAID[False]] if said is None and switches.names_a_head() else []
    return nested.read_nested(config, weights, "dflash", DFLASH_ARCHITECTURE, said is not True, notes)
