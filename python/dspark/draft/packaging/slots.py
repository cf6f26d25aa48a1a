"""Which slot of a block predicts the first drafted token, by content: the question that decides
acceptance."""

from __future__ import annotations

from dspark.checkpoint.config_file import ConfigFile
from dspark.draft.packaging.switches import Switches

DSPARK_ARCHITECTURE = "DSparkDraftModel"
DFLASH_ARCHITECTURE = "DFlashDraftModel"


def is_plain_dflash(config: ConfigFile, switches: Switches) -> bool:
    """z-lab's DFlash: named so and by nothing else, or nameless with a `dflash_config` that knows neither
    DSpark's heads nor its projector."""
    if switches.text("projector_type") == "dspark":
        return False
    seen = config.architectures()
    if seen:
        return all(name == DFLASH_ARCHITECTURE for name in seen)
    return config.raw("dflash_config") is not None and not switches.names_a_head()


def drops_anchor_slot(switches: Switches, default: bool) -> bool:
    """Whether the anchor's own slot predicts nothing: `sample_from_anchor` where it is given."""
    said = switches.flag("sample_from_anchor")
    return default if said is None else not said
