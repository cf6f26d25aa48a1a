"""A `DraftConfig` as the config.json of each packaging: the inverse of `dspark.draft.packaging`."""

from __future__ import annotations

from typing import Any

from dspark.checkpoint.rope import RopeConfig
from dspark.draft.config import DraftConfig

FORMATS = ("flat", "nested", "speculators")

TRAINING_ANCHORS = 512
"""DeepSpec's class requires `num_anchors`, a training setting; this is DeepSpec's own value."""

YARN = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
LLAMA3 = ("low_freq_factor", "high_freq_factor")


def written(config: DraftConfig, form: str, target: str | None) -> dict[str, Any]:
    """The configuration in one of `FORMATS`; `target` names the draft's target in that of speculators."""
    if form == "speculators":
        return speculators(config, target)
    return flat(config) if form == "flat" else nested(config)


def flat(config: DraftConfig) -> dict[str, Any]:
    """DeepSpec's configuration."""
    return {
        "architectures": ["Qwen3DSparkModel"],
        **_layers(config),
        **_blocks(config),
        **_heads(config),
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "num_anchors": TRAINING_ANCHORS,
    }


def nested(config: DraftConfig) -> dict[str, Any]:
    """SpecForge's configuration, or z-lab's where slot 0 is dropped."""
    switches: dict[str, Any] = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        **_heads(config),
    }
    if config.causal:
        switches["causal"] = True
    if not config.drop_anchor_slot:
        switches["projector_type"] = "dspark"
        is_mha = config.num_key_value_heads == config.num_attention_heads
        switches["attention_mode"] = "mha" if is_mha else "gqa"
    return {
        "architectures": ["DFlashDraftModel" if config.drop_anchor_slot else "DSparkDraftModel"],
        **_layers(config),
        **_blocks(config),
        **({"is_causal": True} if config.causal else {}),
        "dflash_config": switches,
    }


def speculators(config: DraftConfig, verifier: str | None) -> dict[str, Any]:
    """The configuration of speculators, of kind dspark where there are heads; `verifier` names the target."""
    kind = "dspark" if config.markov_rank or config.enable_confidence_head else "dflash"
    return {
        "architectures": ["DSparkSpeculator" if kind == "dspark" else "DFlashSpeculator"],
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.gamma}],
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
        "transformer_layer_config": _layers(config),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": not config.drop_anchor_slot,
        "sliding_window_non_causal": config.window_rule == "anchored, bidirectional",
        **_blocks(config),
        **_heads(config),
    }


def _layers(config: DraftConfig) -> dict[str, Any]:
    kinds = ["full_attention" if window is None else "sliding_attention" for window in config.windows]
    windows = {window for window in config.windows if window is not None}
    return {
        "model_type": "qwen3",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.attention_bias,
        "hidden_act": "silu",
        "layer_types": kinds,
        "use_sliding_window": bool(windows),  # without it Qwen3's configuration drops the window
        "sliding_window": windows.pop() if windows else None,
        "rope_theta": config.rope.theta,
        "rope_parameters": _rope(config.rope),
        "tie_word_embeddings": False,
    }


def _rope(rope: RopeConfig) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind == "default":
        return found
    found |= {
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original_max_position_embeddings,
    }
    keys = {"yarn": YARN, "llama3": LLAMA3}.get(rope.kind, ())
    return found | {key: value for key in keys if (value := getattr(rope, key)) is not None}


def _blocks(config: DraftConfig) -> dict[str, Any]:
    found: dict[str, Any] = {
        "block_size": config.block_size,
        "training_block_size": config.training_block_size,
    }
    if config.num_target_layers is not None:
        found["num_target_layers"] = config.num_target_layers
    return found


def _heads(config: DraftConfig) -> dict[str, Any]:
    found: dict[str, Any] = {
        "markov_rank": config.markov_rank,
        "enable_confidence_head": config.enable_confidence_head,
    }
    if config.markov_head_type is not None:
        found["markov_head_type"] = config.markov_head_type
    if config.enable_confidence_head:
        found["confidence_head_with_markov"] = config.confidence_head_with_markov
    return found
