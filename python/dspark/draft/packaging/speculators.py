"""The speculators packaging: layers described in `transformer_layer_config`, taps counted from the
embeddings, and often a reduced draft vocabulary.

`DSparkSpeculator` and speculators' own DFlash have the same form: `aux_hidden_state_layer_ids` is tap + 1 (0
being the embeddings), heads are named at top level, and `sample_from_anchor` says whether slot 0 predicts.
"""

from __future__ import annotations

from dspark.checkpoint.config_file import ConfigFile, positive_integer
from dspark.checkpoint.weights import WeightFiles
from dspark.draft.config import DraftConfig
from dspark.draft.packaging.common import read_backbone
from dspark.draft.packaging.heads import HeadDefaults
from dspark.draft.packaging.slots import UNSAID, says_anchor_predicts
from dspark.draft.packaging.switches import Switches
from dspark.errors import CheckpointError

BODY = "transformer_layer_config"
KEYS = (BODY, "speculators_config", "speculators_model_type")
KINDS = ("dspark", "dflash")
ARCHITECTURES = {
    "DSparkSpeculator": "dspark",
    "DSparkDraftModel": "dspark",
    "Qwen3DSparkModel": "dspark",
    "DFlashSpeculator": "dflash",
    "DFlashDraftModel": "dflash",
}


def is_speculators(config: ConfigFile) -> bool:
    """Whether the config has any of the keys that only this packaging has."""
    return any(config.raw(key) is not None for key in KEYS)


def recognise(config: ConfigFile, weights: WeightFiles) -> bool:
    """See `is_speculators`."""
    return is_speculators(config)


def read(config: ConfigFile, weights: WeightFiles) -> DraftConfig:
    """Reads a checkpoint that `recognise` accepts."""
    body = config.inside(BODY)
    if body is None:
        raise CheckpointError(
            f"{config.path}: {BODY} is missing; the speculators packaging describes its layers there"
        )
    kind, notes = _kind(config), list[str]()
    switches = Switches(config)
    taps = _taps(config, switches)
    drop = _drops_anchor_slot(config, switches, kind, notes)
    found = read_backbone(
        config,
        weights,
        packaging="speculators",
        architecture=(config.architectures() or ["none"])[0],
        taps=taps,
        defaults=HeadDefaults(),
        drop_anchor_slot=drop,
        window_rule="anchored, bidirectional"
        if config.flag("sliding_window_non_causal", False)
        else "anchored",
        body=body,
        notes=notes,
    )
    said = config.optional_integer("target_hidden_size")
    if said is not None and said != found.target_hidden_size:
        raise CheckpointError(
            f"{config.path}: target_hidden_size is {said}, but with {len(taps)} taps fc.weight in "
            f"{weights.where()} has {found.target_hidden_size} columns for each"
        )
    return found


def _kind(config: ConfigFile) -> str:
    """The kind, "dspark" or "dflash", by `speculators_model_type` and `architectures`, which must agree."""
    places = [("speculators_model_type", config.raw("speculators_model_type"))]
    places += [("architectures", ARCHITECTURES.get(name, name)) for name in config.architectures()]
    kind: str | None = config.agreed(
        places,
        lambda value: value if value in KINDS else None,
        f"dspark, dflash or one of {', '.join(ARCHITECTURES)}",
    )
    if kind is None:
        raise CheckpointError(
            f"{config.path}: neither speculators_model_type nor architectures says whether this is "
            f"{' or '.join(KINDS)}"
        )
    return kind


def _drops_anchor_slot(config: ConfigFile, switches: Switches, kind: str, notes: list[str]) -> bool:
    """`sample_from_anchor` is newer than the format. Before it, slot 0 predicted nothing in DSpark drafts
    either (speculators, pull request 760); the number of proposed tokens tells such drafts apart."""
    said = says_anchor_predicts(switches)
    if said is not None:
        return not said
    tokens, width = _speculative_tokens(config), switches.positive("block_size")
    if width is not None and tokens in (width, width - 1):
        drop = tokens < width
        notes.append(
            f"sample_from_anchor is missing: {str(not drop).lower()}, because {tokens} tokens are proposed "
            f"from blocks of {width}"
        )
        return drop
    if kind == "dspark":
        notes.append(UNSAID[True])
        return False
    notes.append("sample_from_anchor is missing: false, the default of dflash")
    return True


def _speculative_tokens(config: ConfigFile) -> int | None:
    """`speculative_tokens` of the first proposal method, which speculators' own loader and vLLM read, too."""
    methods = (config.object("speculators_config") or {}).get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else None
    tokens = first.get("speculative_tokens") if isinstance(first, dict) else None
    return positive_integer(tokens)


def _taps(config: ConfigFile, switches: Switches) -> tuple[int, ...]:
    layers = switches.integers("aux_hidden_state_layer_ids")
    if layers is None:
        raise CheckpointError(
            f"{config.path}: aux_hidden_state_layer_ids is missing, and the speculators packaging has no "
            "default"
        )
    if min(layers) < 0:
        raise CheckpointError(
            f"{config.path}: aux_hidden_state_layer_ids {list(layers)} has a negative entry; 0 is the "
            "embeddings"
        )
    return tuple(layer - 1 for layer in layers)
