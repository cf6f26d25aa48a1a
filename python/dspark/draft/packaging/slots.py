"""Which slot of a block predicts the first drafted token, by content: the question that decides
acceptance."""

from __future__ import annotations

from dspark.checkpoint.config_file import ConfigFile, boolean
from dspark.draft.packaging.switches import Switches

DSPARK_ARCHITECTURE = "DSparkDraftModel"
DFLASH_ARCHITECTURE = "DFlashDraftModel"
DFLASH_NAMES = (DFLASH_ARCHITECTURE, "Qwen3DFlashDraftModel")
"""Also what NeMo Automodel calls the same layout."""

UNSAID = (
    "nothing says which slot predicts the first drafted token: if next to no drafted token is accepted, set "
    "sample_from_anchor in config.json to the other value"
)
"""A note of configurations that leave it to a default which some trainers did not follow."""


def is_plain_dflash(config: ConfigFile, switches: Switches) -> bool:
    """z-lab's DFlash: named so and by nothing else, or nameless with a `dflash_config` that knows neither
    DSpark's heads nor its projector."""
    if switches.text("projector_type") == "dspark":
        return False
    seen = config.architectures()
    if seen:
        return all(name in DFLASH_NAMES for name in seen)
    return config.raw("dflash_config") is not None and not switches.names_a_head()


def says_anchor_predicts(switches: Switches) -> bool | None:
    """`sample_from_anchor`, or `query_zero_predicts_next`, or Model-Optimizer's `shift_label`."""
    places = [*switches.places("sample_from_anchor"), *switches.places("query_zero_predicts_next")]
    # Elsewhere it is a switch of training that is false by default, whatever the slots predict.
    if switches.text("projector_type") == "dspark":
        places += [place for place in switches.places("shift_label") if place[1] is not False]
    return switches.config.agreed(places, boolean, "true or false")


def drops_anchor_slot(switches: Switches, default: bool) -> bool:
    """Whether the anchor's own slot predicts nothing."""
    said = says_anchor_predicts(switches)
    return default if said is None else not said
