"""What the rows of a block see in each layer, read from all the keys that trainers use for it."""

from __future__ import annotations

from dataclasses import dataclass

from dspark.checkpoint.config_file import ConfigFile
from dspark.draft.packaging.switches import Switches
from dspark.errors import CheckpointError

NOT_CAUSAL = "anchored, bidirectional"
"""The window rule under which rows of sliding layers see later ones."""


@dataclass(frozen=True)
class Visibility:
    """The fields of `DraftConfig` about visibility."""

    windows: tuple[int | None, ...]
    causal: bool
    notes: tuple[str, ...]


def read_visibility(config: ConfigFile, body: ConfigFile, layers: int, window_rule: str | None) -> Visibility:
    """Reads `layer_types` and `sliding_window`, `use_swa` and `swa_window_size`, `is_causal` and `causal`.

    Args:
        body: the part of the config about the layers, or the config itself.
        window_rule: what a sliding layer of this packaging sees, or None if it sees everything.

    Raises:
        CheckpointError: a value of the wrong kind, two values for one thing, or a visibility that no rule of
            this packaging allows.
    """
    windows = body.layer_windows(layers)
    _check_windows(config, windows, window_rule)
    causal = _causal(config, body, any(windows), window_rule)
    if window_rule is None and any(windows):
        note = "sliding layers see everything: its format applies no window to a block"
        return Visibility((None,) * layers, causal, (note,))
    return Visibility(windows, causal, ())


def _check_windows(config: ConfigFile, windows: tuple[int | None, ...], window_rule: str | None) -> None:
    """`use_swa` may only repeat what `layer_types` says, and the window must have a single width."""
    switches, window = Switches(config), next(filter(None, windows), None)
    if switches.flag("use_swa") and (window_rule is None or window is None):
        raise CheckpointError(
            f"{config.path}: use_swa is true, expected false or sliding_attention in layer_types; windows "
            "on layers that layer_types does not call sliding are not supported"
        )
    for key in ("swa_window_size", "sliding_window") if window is not None else ():
        size = switches.count(key)
        if size and size != window:
            raise CheckpointError(
                f"{config.path}: {key} is {size}, but sliding layers have the window {window}; they must be "
                "equal"
            )


def _causal(config: ConfigFile, body: ConfigFile, slides: bool, window_rule: str | None) -> bool:
    """Whether no row of a block sees a later one in any layer. If no key says so, this is left to the window
    rule of the sliding layers."""
    said = [Switches(part).flag("is_causal", "causal") for part in (config, body)]
    if True in said and False in said:
        raise CheckpointError(
            f"{config.path}: is_causal is {str(said[0]).lower()}, but {str(said[1]).lower()} in "
            f"{body.prefix.rstrip('.')}; they must be equal"
        )
    if True in said and window_rule != "sliding":
        raise CheckpointError(
            f"{config.path}: is_causal or causal is true, expected false or nothing; causal blocks are "
            "supported in nested and plain DFlash drafts alone"
        )
    if False in said and slides and window_rule not in (None, NOT_CAUSAL):
        raise CheckpointError(
            f"{config.path}: is_causal or causal is false, but layer_types has sliding_attention; sliding "
            "layers whose rows see later ones are not supported here"
        )
    return True in said
