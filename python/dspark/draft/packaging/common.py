"""What the packagings of a Qwen3-shaped backbone have in common."""

from __future__ import annotations

from collections.abc import Sequence

from dspark.checkpoint.config_file import ConfigFile
from dspark.checkpoint.rope import partial_rotary_factor, read_rope
from dspark.checkpoint.weights import WeightFiles
from dspark.draft.config import DraftConfig
from dspark.draft.packaging.heads import HeadDefaults, read_heads
from dspark.draft.packaging.switches import Switches
from dspark.draft.packaging.visibility import read_visibility
from dspark.draft.vocabulary import read_draft_vocab_size
from dspark.errors import CheckpointError
from dspark.target.config import QWEN3_HEAD_DIM, attention_sizes

EMBEDDINGS = "embed_tokens.weight"
HEAD = "lm_head.weight"
PROJECTION = "fc.weight"
WIDEST_BLOCK = 1024


def read_backbone(
    config: ConfigFile,
    weights: WeightFiles,
    *,
    packaging: str,
    architecture: str,
    taps: tuple[int, ...],
    defaults: HeadDefaults,
    drop_anchor_slot: bool = False,
    window_rule: str | None = "sliding",
    body: ConfigFile | None = None,
    notes: Sequence[str] = (),
) -> DraftConfig:
    """A `DraftConfig` from the keys that mean the same in every packaging.

    `body` is the part of the config about the layers, if not the config itself. If `window_rule` is None,
    sliding layers see everything.
    """
    switches = Switches(config)
    body = config if body is None else body
    sizes = attention_sizes(body, QWEN3_HEAD_DIM)
    vocab_size, layers = body.integer("vocab_size"), body.integer("num_hidden_layers")
    sees = read_visibility(config, body, layers, window_rule)
    if body.flag("mlp_bias", False):
        raise CheckpointError(f"{config.path}: mlp_bias is true, which no known draft has")
    block_size = switches.positive("block_size")
    if block_size is None:
        raise CheckpointError(f"{config.path}: block_size is missing")
    training = switches.positive("training_block_size") or block_size
    if training < block_size:
        raise CheckpointError(
            f"{config.path}: training_block_size {training} is less than block_size {block_size}"
        )
    mask = switches.count("mask_token_id")
    if mask is None or mask >= vocab_size:
        found = "missing" if mask is None else mask
        raise CheckpointError(f"{config.path}: mask_token_id is {found}; expected an id below {vocab_size}")
    for key, width in (("block_size", block_size), ("training_block_size", training)):
        if width > WIDEST_BLOCK:
            raise CheckpointError(f"{config.path}: {key} is {width}; expected at most {WIDEST_BLOCK}")
    if drop_anchor_slot and block_size == 1:
        raise CheckpointError(
            f"{config.path}: block_size is 1, but the anchor's slot predicts nothing; expected at least 2"
        )
    target_layers = switches.positive("num_target_layers")
    check_taps(config, taps, target_layers)
    draft_vocab = read_draft_vocab_size(config, weights, vocab_size, switches.positive("draft_vocab_size"))
    heads = read_heads(switches, weights, sizes["hidden_size"], defaults)
    return DraftConfig(
        packaging=packaging,
        architecture=architecture,
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab,
        intermediate_size=body.integer("intermediate_size"),
        num_hidden_layers=layers,
        max_position_embeddings=body.integer("max_position_embeddings"),
        rms_norm_eps=body.positive_number("rms_norm_eps", 1e-6),
        attention_bias=body.flag("attention_bias", False),
        rope=read_rope(body, whole_heads=True),
        windows=sees.windows,
        window_rule=window_rule or "sliding",
        causal=sees.causal,
        drop_anchor_slot=drop_anchor_slot,
        block_size=block_size,
        training_block_size=training,
        mask_token_id=mask,
        target_layer_ids=taps,
        num_target_layers=target_layers,
        target_hidden_size=_tap_width(config, weights, len(taps), sizes["hidden_size"]),
        markov_rank=heads.markov_rank,
        markov_head_type=heads.markov_head_type,
        enable_confidence_head=heads.enable_confidence_head,
        confidence_head_with_markov=heads.confidence_head_with_markov,
        own_embeddings=EMBEDDINGS in weights,
        own_head=HEAD in weights,
        notes=(*notes, *sees.notes, *_rotation_notes(body), *heads.notes),
        **sizes,
    )


def _rotation_notes(body: ConfigFile) -> tuple[str, ...]:
    partial = partial_rotary_factor(body)
    if partial in (None, 1.0):
        return ()
    return (f"partial_rotary_factor {partial} is copied from the target: trainers rotate whole heads",)


def check_taps(config: ConfigFile, taps: tuple[int, ...], target_layers: int | None) -> None:
    """Checks that taps are -1 (embeddings) or layers before the target's last, whose output is not a tap."""
    for tap in taps:
        if tap < -1 or (target_layers is not None and tap > target_layers - 2):
            limit = "the last but one target layer" if target_layers is None else target_layers - 2
            raise CheckpointError(
                f"{config.path}: target_layer_ids has {tap}; expected -1 (embeddings) to {limit}, because "
                "trainers differ on whether the last layer's state is taken before or after the final norm"
            )


def _tap_width(config: ConfigFile, weights: WeightFiles, taps: int, hidden_size: int) -> int:
    """Columns of the projection per tap: the target's hidden size."""
    shape = weights.shape(PROJECTION)
    if shape is None:
        raise CheckpointError(
            f"{weights.where()}: tensor {PROJECTION} is missing; expected {[hidden_size, taps * hidden_size]}"
        )
    if len(shape) != 2 or shape[0] != hidden_size or shape[1] % taps:
        raise CheckpointError(
            f"{weights.where()}: tensor {PROJECTION} has shape {list(shape)}; with {taps} taps "
            f"(target_layer_ids in {config.path}) expected {[hidden_size, taps * hidden_size]}"
        )
    return shape[1] // taps
