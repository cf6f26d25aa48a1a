"""Reads what a config says about rotary embedding, from every place where it may say so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from dspark.checkpoint.config_file import ConfigFile, boolean, string
from dspark.errors import CheckpointError

KINDS = ("default", "linear", "yarn", "llama3")
PLACES = ("rope_parameters", "rope_scaling")
DEFAULT_THETA = 10_000.0
LARGEST_ROTARY = 1e30
"""No base, factor or limit is larger: a larger value, or one that is not a number, is from a damaged file."""

T = TypeVar("T")


@dataclass(frozen=True)
class RopeConfig:
    """The rotation of one model. Fields that a kind does not use keep their defaults."""

    kind: str = "default"
    theta: float = DEFAULT_THETA
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    proportion: float = 1.0
    """Kind "proportional" (Gemma 4): the part of the pairs that rotates; the others stand still."""


def read_rope(config: ConfigFile, *, whole_heads: bool = False) -> RopeConfig:
    """Reads `rope_theta`, `rope_parameters` and `rope_scaling`; absent, null or equal values are fine.

    With `whole_heads`, a rotation of kind "default" ignores `partial_rotary_factor`: DeepSpec and others copy
    it from a Qwen3.5 target into the configuration of a draft that rotates whole heads (DeepSpec, issue 71).

    Raises:
        CheckpointError: two places give different values (both are named), the kind is unknown, or a value
            is missing.
    """
    reader = _Reader(config, _blocks(config))
    kind = reader.value("rope_type", string, extra_key="type") or "default"
    if kind not in KINDS:
        raise CheckpointError(f"{config.path}: rope_type is {kind!r}; supported are {', '.join(KINDS)}")
    partial = partial_rotary_factor(config)
    if partial not in (None, 1.0) and not (whole_heads and kind == "default"):
        raise CheckpointError(
            f"{config.path}: partial_rotary_factor is {partial}; only 1.0 is supported here"
        )
    theta = reader.value("rope_theta", _number, top_level=True)
    if theta is None:
        theta = DEFAULT_THETA
    if theta <= 1.0:
        raise CheckpointError(f"{config.path}: {config.prefix}rope_theta is {theta}; expected more than 1")
    if kind == "default":
        return RopeConfig(kind=kind, theta=theta)
    return _extended(kind, theta, reader)


def partial_rotary_factor(config: ConfigFile) -> float | None:
    """The share of each head that rotates, if the configuration gives one; errors as in `read_rope`."""
    return _Reader(config, _blocks(config)).value("partial_rotary_factor", _number, top_level=True)


def _blocks(config: ConfigFile) -> dict[str, dict[str, Any]]:
    blocks = {place: block for place in PLACES if (block := config.object(place)) is not None}
    for place, block in blocks.items():
        if any(isinstance(value, dict) for value in block.values()):
            raise CheckpointError(
                f"{config.path}: {place} differs by layer, which this model does not support"
            )
    return blocks


def _extended(kind: str, theta: float, reader: _Reader) -> RopeConfig:
    limit = reader.config.optional_integer("max_position_embeddings")
    original_key = "original_max_position_embeddings"
    original = reader.value(original_key, _number, top_level=True) or limit
    factor = reader.value("factor", _number)
    if factor is None and kind == "yarn" and limit and original:
        factor = limit / original
    needed: list[tuple[str, float | None]] = [("factor", factor)]
    if kind != "linear":
        needed.append((original_key, original))
    low = reader.value("low_freq_factor", _number)
    high = reader.value("high_freq_factor", _number)
    if kind == "llama3":
        needed += [("low_freq_factor", low), ("high_freq_factor", high)]
    for key, value in needed:
        if value is None or value <= 0:
            raise CheckpointError(
                f"{reader.config.path}: rope_type {kind!r} needs a positive {key}, found {value}"
            )
    if original is not None and original < 1 and kind != "linear":
        raise CheckpointError(f"{reader.config.path}: {original_key} is {original}; expected at least 1")
    if kind == "llama3" and (low is None or high is None or low >= high):
        raise CheckpointError(
            f"{reader.config.path}: low_freq_factor is {low}; expected less than high_freq_factor {high}"
        )
    truncate = reader.value("truncate", boolean)
    return RopeConfig(
        kind=kind,
        theta=theta,
        factor=factor or 1.0,
        original_max_position_embeddings=int(original or 0),
        low_freq_factor=low or 1.0,
        high_freq_factor=high or 4.0,
        beta_fast=_positive(reader, "beta_fast") or 32.0,
        beta_slow=_positive(reader, "beta_slow") or 1.0,
        attention_factor=_positive(reader, "attention_factor"),
        mscale=reader.value("mscale", _number),
        mscale_all_dim=reader.value("mscale_all_dim", _number),
        truncate=True if truncate is None else truncate,
    )


def _positive(reader: _Reader, key: str) -> float | None:
    value = reader.value(key, _number)
    if value is not None and value <= 0:
        raise CheckpointError(
            f"{reader.config.path}: {key} of the rotation is {value}; expected a positive number"
        )
    return value


class _Reader:
    """Looks a key up in every block, and at top level where configs put it there."""

    def __init__(self, config: ConfigFile, blocks: dict[str, dict[str, Any]]) -> None:
        self.config = config
        self._blocks = blocks

    def value(
        self,
        key: str,
        convert: Callable[[Any], T | None],
        *,
        extra_key: str | None = None,
        top_level: bool = False,
    ) -> T | None:
        places: list[tuple[str, Any]] = [(key, self.config.raw(key))] if top_level else []
        for place, block in self._blocks.items():
            places.append((f"{place}.{key}", block.get(key)))
            if extra_key is not None:
                places.append((f"{place}.{extra_key}", block.get(extra_key)))
        kinds: dict[Any, str] = {string: "a string", boolean: "true or false"}
        return self.config.agreed(places, convert, kinds.get(convert, "a number"))


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= LARGEST_ROTARY else None
