"""Drafts that are known but not supported, each refused by name."""

from __future__ import annotations

from dspark.checkpoint.config_file import ConfigFile
from dspark.checkpoint.weights import WeightFiles
from dspark.draft.packaging.switches import Switches
from dspark.errors import CheckpointError

SPECULATORS_KEYS = ("transformer_layer_config", "speculators_config", "speculators_model_type")
KNOWN_ARCHITECTURES = ("Qwen3DSparkModel", "DSparkDraftModel", "DFlashDraftModel")
ATTENTION_MODES = ("gqa", "mha")


def refuse_unsupported(config: ConfigFile, weights: WeightFiles) -> None:
    """Raises `CheckpointError` for packagings, architectures and features that cannot be loaded."""

    def refuse(reason: str) -> CheckpointError:
        return CheckpointError(f"{config.path}: {reason}")

    for key in SPECULATORS_KEYS:
        if config.raw(key) is not None:
            raise refuse(f"this is the speculators packaging (it has {key}), which is not supported")
    reduced = config.raw("draft_vocab_size")
    if "d2t" in weights or (reduced is not None and reduced != config.raw("vocab_size")):
        raise refuse(
            f"the draft has a reduced vocabulary (draft_vocab_size {reduced}), which is not supported"
        )
    if config.raw("quantization_config") is not None:
        raise refuse("quantization_config is set; quantised weights are not supported")
    unknown = [name for name in config.architectures() if name not in KNOWN_ARCHITECTURES]
    if unknown:
        raise refuse(
            f"architectures has {', '.join(unknown)}; known drafts are {', '.join(KNOWN_ARCHITECTURES)}"
        )
    switches = Switches(config)
    if _is_plain_dflash(config, switches):
        raise refuse(
            "this is a plain DFlash draft (dflash_config without DSpark's heads or projector_type 'dspark'), "
            "which is not supported"
        )
    modes = switches.raw("attention_modes") or [switches.text("attention_mode") or "gqa"]
    for mode in modes:
        if mode not in ATTENTION_MODES:
            raise refuse(f"attention_mode is {mode!r}; supported are {', '.join(ATTENTION_MODES)}")
    activation = config.text("hidden_act", "silu")
    if activation != "silu":
        raise refuse(f"hidden_act is {activation!r}; only 'silu' is supported")


def _is_plain_dflash(config: ConfigFile, switches: Switches) -> bool:
    """Slot 0 of such a draft predicts nothing, so taking it for DSpark would ruin acceptance in silence."""
    if switches.text("projector_type") == "dspark" or "DSparkDraftModel" in config.architectures():
        return False
    if config.architectures() == ["DFlashDraftModel"]:
        return True
    return (
        config.raw("dflash_config") is not None and not config.architectures() and not switches.names_a_head()
    )
