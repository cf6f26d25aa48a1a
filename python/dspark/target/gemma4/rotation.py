"""What a Gemma 4 config says about rotary embedding: one block for each kind of layer."""

from __future__ import annotations

from typing import Any

from dspark.checkpoint.config_file import ConfigFile
from dspark.checkpoint.rope import RopeConfig, read_rope
from dspark.errors import CheckpointError

SLIDING = "sliding_attention"
FULL = "full_attention"

DEFAULTS = {
    SLIDING: RopeConfig(theta=10_000.0),
    FULL: RopeConfig(kind="proportional", theta=1_000_000.0, proportion=0.25),
}
"""The rotations of a config without `rope_parameters`."""


def read_rotation(config: ConfigFile, kind: str) -> RopeConfig:
    """The rotation of the layers of one kind.

    Drafts have `rope_type` and a null `rope_theta` beside the two blocks; both are ignored.

    Raises:
        CheckpointError: the kind has no block, its type is unknown, a value is missing, or a base beside the
            blocks equals neither block's.
    """
    blocks = config.object("rope_parameters")
    if blocks is None:
        if config.raw("rope_scaling") is not None:
            raise config.wrong("rope_scaling", "absent in a Gemma 4 config", config.raw("rope_scaling"))
        return DEFAULTS[kind]
    block = blocks.get(kind)
    if not isinstance(block, dict):
        raise config.wrong(f"rope_parameters.{kind}", "an object", block)
    _check_strays(config, blocks)
    if block.get("rope_type") == "proportional":
        return _proportional(config, kind, block)
    if block.get("rope_theta") is None:
        raise CheckpointError(f"{config.path}: rope_parameters.{kind} has no rope_theta")
    values = {"rope_parameters": block, "max_position_embeddings": config.raw("max_position_embeddings")}
    return read_rope(ConfigFile(config.path, values, config.prefix))


def _proportional(config: ConfigFile, kind: str, block: dict[str, Any]) -> RopeConfig:
    inner = ConfigFile(config.path, block, f"{config.prefix}rope_parameters.{kind}.")
    theta, factor = inner.number("rope_theta", 0.0), inner.number("factor", 1.0)
    proportion = inner.number("partial_rotary_factor", 1.0)
    if theta <= 0.0 or factor <= 0.0 or not 0.0 < proportion <= 1.0:
        raise CheckpointError(
            f"{config.path}: rope_parameters.{kind} needs a positive rope_theta and factor and a "
            f"partial_rotary_factor above 0 and up to 1, found {block}"
        )
    return RopeConfig(kind="proportional", theta=theta, factor=factor, proportion=proportion)


def _check_strays(config: ConfigFile, blocks: dict[str, Any]) -> None:
    inner = {kind: blocks[kind] for kind in (SLIDING, FULL) if isinstance(blocks.get(kind), dict)}
    bases = {kind: block.get("rope_theta") for kind, block in inner.items()}
    for place, stray in (
        ("rope_theta", config.raw("rope_theta")),
        ("rope_parameters.rope_theta", blocks.get("rope_theta")),
    ):
        if stray is not None and stray not in bases.values():
            raise CheckpointError(
                f"{config.path}: {place} is {stray!r}, but the layers' own blocks in rope_parameters "
                f"say {bases}"
            )
