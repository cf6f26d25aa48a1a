"""Drafts that are known but not supported, each refused by name."""

from __future__ import annotations

from dspark.checkpoint.config_file import ConfigFile, shortened
from dspark.checkpoint.weights import WeightFiles
from dspark.draft.packaging.common import HEAD
from dspark.draft.packaging.gemma4 import has_gemma4_layers
from dspark.draft.packaging.neutral import refuse_other_arithmetic
from dspark.draft.packaging.speculators import BODY
from dspark.draft.packaging.switches import Switches
from dspark.errors import CheckpointError

KNOWN_ARCHITECTURES = (
    "Qwen3DSparkModel",
    "Gemma4DSparkModel",
    "DSparkDraftModel",
    "DFlashDraftModel",
    "Qwen3DFlashDraftModel",
    "DSparkSpeculator",
    "DFlashSpeculator",
)
ATTENTION_MODES = ("gqa", "mha")
PROJECTORS = ("dflash", "dspark")
MASK_EMBEDDING = "mask_embedding.pt"


def refuse_unsupported(config: ConfigFile, weights: WeightFiles) -> None:
    """Raises `CheckpointError` for packagings, architectures and features that cannot be loaded."""

    def refuse(reason: str) -> CheckpointError:
        return CheckpointError(f"{config.path}: {reason}")

    parts = [part for part in (config, config.inside(BODY)) if part is not None]
    for part in parts:
        part.refuse_quantised()
    unknown = [name for name in config.architectures() if name not in KNOWN_ARCHITECTURES]
    if unknown:
        raise refuse(
            f"architectures has {', '.join(unknown)}; known drafts are {', '.join(KNOWN_ARCHITECTURES)}"
        )
    switches = Switches(config)
    modes = switches.raw("attention_modes") or switches.text("attention_mode") or "gqa"
    for mode in modes if isinstance(modes, list) else [modes]:
        if mode not in ATTENTION_MODES:
            raise refuse(f"attention_mode is {mode!r}; supported are {', '.join(ATTENTION_MODES)}")
    projector = switches.text("projector_type")
    if projector not in (None, *PROJECTORS):
        raise refuse(f"projector_type is {projector!r}; supported are {', '.join(PROJECTORS)}")
    if switches.flag("shift_label") and projector != "dspark":
        raise refuse(
            f"shift_label is true, but projector_type is {projector!r}; it is only known from 'dspark' drafts"
        )
    for part in parts:
        activation = part.text("hidden_act", "silu")
        if activation != "silu":
            raise refuse(f"{part.prefix}hidden_act is {activation!r}; only 'silu' is supported")
    refuse_other_arithmetic(parts)
    for part in parts:
        cap = part.raw("final_logit_softcapping")
        # A borrowed head is capped as the target's is: DFlash drafts for Gemma 4 say so in their configs.
        if cap is not None and HEAD in weights and not has_gemma4_layers(weights):
            raise refuse(
                f"{part.prefix}final_logit_softcapping is {shortened(cap)}, expected nothing: {HEAD} is the "
                "draft's own, and only a target's output head or that of Gemma 4's layers can be capped"
            )
    if (weights.directory / MASK_EMBEDDING).exists():
        raise CheckpointError(
            f"{weights.directory / MASK_EMBEDDING}: a mask embedding outside of the vocabulary is not "
            "supported; expected the row of mask_token_id in the embedding table"
        )
