"""The configuration of a new draft, from its target's and from what is asked for."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from dspark.checkpoint.rope import RopeConfig
from dspark.draft.config import MARKOV_HEADS, DraftConfig
from dspark.draft.packaging.common import WIDEST_BLOCK
from dspark.errors import ConfigError
from dspark.text import Tokenizer

MASK_NAMES = ("<|mask|>", "<mask>", "[MASK]")


@dataclass(frozen=True, slots=True)
class Shape:
    """What a user chooses about a new draft; None follows the target.

    Attributes:
        layers: draft layers. taps: target layers to read, default: see `default_taps`.
        block_size, training_block_size: width when served, and when trained (None: the same).
        markov_head_type: "vanilla", "gated", "rnn" or "none". markov_rank: its rank.
        confidence: a confidence head; it reads the Markov feature if there is a Markov head.
        mask_token_id: the token for a block's inputs after the anchor; None: `mask_token` finds one.
        vocabulary: size of a reduced draft vocabulary, None: the whole.
        intermediate_size, num_attention_heads, num_key_value_heads, head_dim: of a draft layer.
    """

    mask_token_id: int | None = None
    layers: int = 5
    taps: tuple[int, ...] | None = None
    block_size: int = 7
    training_block_size: int | None = None
    markov_head_type: str = "vanilla"
    markov_rank: int = 256
    confidence: bool = True
    vocabulary: int | None = None
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None


def default_taps(layers: int, count: int = 5) -> tuple[int, ...]:
    """Taps spread from the second layer to the third last, as in the published drafts (1, 9, 17, 25, 33 of
    36); fewer if the target has too few layers."""
    first, last = min(1, max(layers - 2, 0)), max(layers - 3, 0)
    count = min(count, last - first + 1) if last > first else 1
    steps = max(count - 1, 1)
    return tuple(first + (i * (last - first) * 2 + steps) // (2 * steps) for i in range(count))


def mask_token(tokenizer: Tokenizer | None, used: Container[int]) -> int:
    """A special token to stand for "not drafted yet": one with a name in `MASK_NAMES`, else the first that no
    conversation uses and that is not an end token.

    Raises:
        ConfigError: there is none.
    """
    if tokenizer is not None:
        for name in MASK_NAMES:
            found = tokenizer.backend.token_to_id(name)
            if found is not None:
                return int(found)
        for token in sorted(tokenizer.special_token_ids):
            if token not in tokenizer.eos_token_ids and token not in used:
                return token
    raise ConfigError("the target has no special token to spare for the mask: give mask_token_id")


def draft_config(shape: Shape, target: Any) -> DraftConfig:
    """The draft's configuration as it is trained: with embeddings and head of its own.

    `target` is a target's config; sizes that it does not have must be in `shape`.

    Raises:
        ConfigError: names the value, what was expected and what was found.
    """
    vocab = target.vocab_size
    taps = shape.taps or default_taps(target.num_hidden_layers)
    training = shape.training_block_size or shape.block_size
    rank = 0 if shape.markov_head_type == "none" else shape.markov_rank
    mask = _check(shape, taps, training, rank, target)
    return DraftConfig(
        packaging="flat",
        architecture="Qwen3DSparkModel",
        vocab_size=vocab,
        draft_vocab_size=shape.vocabulary or vocab,
        hidden_size=target.hidden_size,
        intermediate_size=_size(shape, target, "intermediate_size"),
        num_hidden_layers=shape.layers,
        num_attention_heads=_size(shape, target, "num_attention_heads"),
        num_key_value_heads=_size(shape, target, "num_key_value_heads"),
        head_dim=_size(shape, target, "head_dim"),
        max_position_embeddings=target.max_position_embeddings,
        rms_norm_eps=getattr(target, "rms_norm_eps", 1e-6),
        attention_bias=False,
        rope=_rope(target),
        windows=(None,) * shape.layers,
        block_size=shape.block_size,
        training_block_size=training,
        mask_token_id=mask,
        target_layer_ids=taps,
        num_target_layers=target.num_hidden_layers,
        target_hidden_size=target.hidden_size,
        markov_rank=rank,
        markov_head_type=None if rank == 0 else shape.markov_head_type,
        enable_confidence_head=shape.confidence,
        confidence_head_with_markov=shape.confidence and rank > 0,
        own_embeddings=True,
        own_head=True,
    )


def _check(shape: Shape, taps: tuple[int, ...], training: int, rank: int, target: Any) -> int:
    def refuse(name: str, found: object, expected: str) -> ConfigError:
        return ConfigError(f"{name} is {found}; expected {expected}")

    if shape.layers < 1:
        raise refuse("layers", shape.layers, "at least 1")
    if not 1 <= shape.block_size <= training <= WIDEST_BLOCK:
        raise refuse(
            "block_size", f"{shape.block_size} with training_block_size {training}",
            f"1 <= block_size <= training_block_size <= {WIDEST_BLOCK}",
        )  # fmt: skip
    if shape.markov_head_type not in (*MARKOV_HEADS, "none"):
        raise refuse("markov_head_type", repr(shape.markov_head_type), f"one of {MARKOV_HEADS} or none")
    if shape.markov_head_type != "none" and rank < 1:
        raise refuse("markov_rank", rank, "at least 1; for no Markov head say markov_head_type none")
    most = target.num_hidden_layers - 2
    if list(taps) != sorted(set(taps)) or taps[0] < -1 or taps[-1] > most:
        raise refuse("taps", list(taps), f"ascending layers from -1 (embeddings) to {most}")
    if shape.mask_token_id is None or not 0 <= shape.mask_token_id < target.vocab_size:
        raise refuse("mask_token_id", shape.mask_token_id, f"a token below {target.vocab_size}")
    if shape.vocabulary is not None and not 1 <= shape.vocabulary <= target.vocab_size:
        raise refuse("vocabulary", shape.vocabulary, f"1 to {target.vocab_size}")
    return shape.mask_token_id


def _size(shape: Shape, target: Any, name: str) -> int:
    value = getattr(shape, name) or getattr(target, name, None)
    if not isinstance(value, int):
        raise ConfigError(f"{name} must be given: the target's configuration does not say it")
    return value


def _rope(target: Any) -> RopeConfig:
    """The target's rotation; if only a part of each of its heads rotates, a plain one with the same base."""
    rope: RopeConfig = getattr(target, "rope", RopeConfig())
    head_dim = getattr(target, "head_dim", None)
    whole = getattr(target, "rotary_dim", head_dim) == head_dim and rope.kind != "proportional"
    return rope if whole else RopeConfig(theta=rope.theta)
