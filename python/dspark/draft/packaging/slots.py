"""Which slot of a block predicts the first drafted token, judged by a checkpoint's content: acceptance
depends on it."""

from __future__ import annotations

from dspark.checkpoint.config_file import ConfigFile, boolean
from dspark.draft.packaging.switches import Switches

DSPARK_ARCHITECTURE = "DSparkDraftModel"
DFLASH_ARCHITECTURE = "DFlashDraftModel"
DFLASH_NAMES = (DFLASH_ARCHITECTURE, "Qwen3DFlashDraftModel")
"""The names of the plain layout; the second is NeMo Automodel's."""

UNSAID = {
    predicts: f"sample_from_anchor is missing and taken as {str(predicts).lower()}: if next to no drafted "
    f"token is accepted, set it to {str(not predicts).lower()} in config.json"
    for predicts in (True, False)
}
"""The note on configurations that leave slot 0 to a default which some trainers did not follow."""


def is_plain_dflash(config: ConfigFile, switches: Switches) -> bool:
    """Whether this is z-lab's DFlash: by having no other name, or without a name by a `dflash_config` that
    mentions neither DSpark's heads nor its projector."""
    if switches.text("projector_type") == "dspark":
        return False
    seen = config.architectures()
    if seen:
        return all(name in DFLASH_NAMES for name in seen)
    return config.raw("dflash_config") is not None and not switches.names_a_head()


def says_anchor_predicts(switches: Switches) -> bool | None:
    """`sample_from_anchor`, or `query_zero_predicts_next`, or Model-Optimizer's `shift_label`."""
    places = [*switches.places("sample_from_anchor"), *switches.places("query_zero_predicts_next")]
    # In other drafts `shift_label` is a training switch, false by default whatever the slots predict.
    if switches.text("projector_type") == "dspark":
        places += [place for place in switches.places("shift_label") if place[1] is not False]
    return switches.config.agreed(places, boolean, "true or false")


def drops_anchor_slot(switches: Switches, default: bool) -> bool:
    """Whether the anchor's own slot predicts nothing."""
    said = says_anchor_predicts(switches)
    return default if said is None else not said
