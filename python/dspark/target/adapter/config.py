"""The sizes of an adapted target, and how far its positions may go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from dspark.checkpoint.rope import RopeConfig
from dspark.errors import CheckpointError

LENGTH_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""How configs name the context window; transformers maps most of them to the first itself."""

CHANGING_ROPES = ("dynamic", "longrope", "su")
"""Rotary scalings whose frequencies change once a text is longer than the original context. Keys that were
cached before keep the old ones, so beyond this length a text depends on how it was cut into passes."""


@dataclass(frozen=True, slots=True)
class AdaptedConfig:
    """What others read of a target's configuration. Sizes in elements, positions in tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    """Whether the output head is the embedding matrix and nothing else: no bias, no capping, no factor."""
    limit: str | None = None
    """Why the window is shorter than the checkpoint's, if it is."""
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    """These four, as far as the config names them, are the sizes for a draft's layers."""
    rope: RopeConfig = field(default_factory=RopeConfig)
    """A plain rotation with the config's base, for a draft's layers."""

    @classmethod
    def of_text(cls, text: Any, architecture: str) -> AdaptedConfig:
        """
        Args:
            text: the text part of a transformers config.

        Raises:
            CheckpointError: a size that every target has is missing.
        """
        length, limit = window(text, architecture)
        heads = _named(text, "num_attention_heads")
        hidden = _needed(text, architecture, "hidden_size")
        return cls(
            architecture=architecture,
            vocab_size=_needed(text, architecture, "vocab_size"),
            hidden_size=hidden,
            num_hidden_layers=_needed(text, architecture, "num_hidden_layers"),
            max_position_embeddings=length,
            tie_word_embeddings=False,
            limit=limit,
            intermediate_size=_named(text, "intermediate_size"),
            num_attention_heads=heads,
            num_key_value_heads=_named(text, "num_key_value_heads") or heads,
            head_dim=_named(text, "head_dim") or (None if heads is None else hidden // heads),
            rope=RopeConfig(theta=_theta(text)),
        )


def _named(text: Any, name: str) -> int | None:
    value = getattr(text, name, None)
    return value if isinstance(value, int) and value > 0 else None


def _needed(text: Any, architecture: str, name: str) -> int:
    value = _named(text, name)
    if value is None:
        raise CheckpointError(
            f"{architecture} cannot be a target: its config's {name} is {getattr(text, name, None)!r}"
        )
    return value


def _theta(text: Any) -> float:
    found = [getattr(text, "rope_theta", None)]
    for name in ("rope_parameters", "rope_scaling"):
        rope = getattr(text, name, None)
        found.append(rope.get("rope_theta") if isinstance(rope, dict) else None)
    return next((float(theta) for theta in found if isinstance(theta, int | float)), RopeConfig().theta)


def window(text: Any, architecture: str) -> tuple[int, str | None]:
    """How many positions can be served, and why they are fewer than the config's, if they are.

    Args:
        text: the text part of a transformers config.

    Raises:
        CheckpointError: the config names no context window.
    """
    lengths = [value for name in LENGTH_NAMES if isinstance(value := getattr(text, name, None), int)]
    if not lengths or lengths[0] < 1:
        raise CheckpointError(
            f"{architecture}: its config names no context window (none of {', '.join(LENGTH_NAMES)})"
        )
    length = lengths[0]
    for kind, rope in _ropes(text):
        original = rope.get("original_max_position_embeddings") or getattr(
            text, "original_max_position_embeddings", None
        )
        if kind in CHANGING_ROPES and isinstance(original, int) and original < length:
            return original, (
                f"window {original} instead of {length}: beyond it, {kind} rotary scaling would change the "
                "frequencies of keys that are cached already"
            )
    return length, None


def _ropes(text: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Kind and parameters of every rotary scaling: `rope_parameters` (5.x; one, or one for each kind of
    layer) or `rope_scaling` (4.x)."""
    for name in ("rope_parameters", "rope_scaling"):
        found = getattr(text, name, None)
        if not isinstance(found, dict):
            continue
        inner = [value for value in found.values() if isinstance(value, dict)]
        for rope in [found, *inner]:
            kind = rope.get("rope_type", rope.get("type"))
            if isinstance(kind, str):
                yield kind, rope
