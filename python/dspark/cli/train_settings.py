"""Turns the flags of `dspark train` into settings; refuses flags that would have no effect."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.cli.options import template_options
from dspark.errors import ConfigError
from dspark.paths import expanded

if TYPE_CHECKING:
    from dspark.train.settings import Settings

SHAPE = {
    "layers": "layers",
    "start-layers": "",
    "taps": "taps",
    "block-size": "block_size",
    "training-block-size": "training_block_size",
    "markov-head": "markov_head_type",
    "markov-rank": "markov_rank",
    "no-confidence": "confidence",
    "vocabulary": "vocabulary",
    "mask-token-id": "mask_token_id",
    "intermediate-size": "intermediate_size",
    "num-attention-heads": "num_attention_heads",
    "num-key-value-heads": "num_key_value_heads",
    "head-dim": "head_dim",
}
"""Flags that shape a new draft, without a default of their own, and what `Shape` calls them."""

Needs = dict[str, tuple[str, Callable[[argparse.Namespace], bool]]]
NEEDS: Needs = {
    "openers": ("--self-prompts", lambda o: o.self_prompts > 0),
    "samples": ("--prompts", lambda o: o.prompts is not None),
    "generate-with": ("--prompts or --self-prompts", lambda o: bool(o.prompts or o.self_prompts)),
    "cache-limit": ("--cache", lambda o: o.cache is not None),
    "markov-rank": ("a --markov-head other than none", lambda o: o.markov_head != "none"),
    "confidence": ("a confidence head, not --no-confidence", lambda o: not o.no_confidence),
    "early-share": ("--early-ce", lambda o: o.early_ce is not None),
    "muon-factor": ("--muon", lambda o: o.muon),
}
"""Flags that mean nothing by themselves, what each needs, and whether that is there. The parser has no
defaults for them: if they are not given, the defaults of the settings apply."""


def settings_of(options: argparse.Namespace) -> Settings:
    """The flags as settings.

    Raises:
        ConfigError: names the flag, what was expected and what was found.
    """
    from dspark.train.data.generate import Sampling
    from dspark.train.loop import Pace
    from dspark.train.losses import Objective
    from dspark.train.settings import DataSettings, Settings

    _check_needs(options)
    heat = options.temperature
    if len(heat) > 2:
        raise ConfigError(f"--temperature takes one number or two, found {len(heat)}")
    sampling = Sampling((heat[0], heat[-1]), options.top_p, options.top_k, options.max_tokens)
    data = DataSettings(
        files=tuple(expanded(file, "a file of --data") for file in options.data),
        prompts=_path(options.prompts),
        self_prompts=options.self_prompts,
        openers=_path(options.openers),
        draft=options.generate_with,
        sampling=sampling,
        template_options=template_options(options),
        batch_size=options.batch_size,
        max_length=options.max_length,
        held_out=options.held_out,
        cache=_path(options.cache),
        **_given(options, "samples"),
        **{name: _bytes(value) for name, value in _given(options, "cache_limit").items()},
    )
    goal = Objective(
        cross_entropy=options.ce,
        distance=options.tv,
        decay=options.decay,
        position_weights="dpace" if options.dpace else "decay",
        early_cross_entropy=options.early_ce,
        **_given(options, "confidence", "early_share"),
    )
    pace = Pace(
        steps=options.steps,
        sequences=options.sequences,
        report_every=options.report_every,
        evaluate_every=options.evaluate_every,
        checkpoint_seconds=60.0 * options.checkpoint_minutes,
        stop_after=None if options.stop_after is None else 3600.0 * options.stop_after,
    )
    same = (
        "target", "start", "anchors", "failed_anchors", "context_noise", "detach_confidence",
        "learning_rate", "warmup", "cooldown", "clip", "muon", "weight_decay", "micro_batch",
        "bf16", "device", "dtype", "attention", "parallel", "seed", "packaging", "save_dtype", "tensorboard",
        "held_out_sequences", "accept_changes",
    )  # fmt: skip
    return Settings(
        output=expanded(options.output, "--output"),
        data=data,
        pace=pace,
        goal=goal,
        save_head=not options.lean,
        **_shape(options),
        **_given(options, "muon_factor"),
        **{name: getattr(options, name) for name in same},
    )


def _check_needs(options: argparse.Namespace) -> None:
    for flag, (needed, is_there) in NEEDS.items():
        if getattr(options, flag.replace("-", "_")) is not None and not is_there(options):
            raise ConfigError(f"--{flag} needs {needed}")


def _shape(options: argparse.Namespace) -> dict[str, Any]:
    """`shape` and `start_layers` of the settings."""
    from dspark.train.shape import Shape

    given = {flag: value for flag in SHAPE if (value := getattr(options, flag.replace("-", "_"))) is not None}
    if options.start is not None:
        for flag in given:
            if flag != "training-block-size":
                raise ConfigError(f"--{flag} is for a new draft: the draft of --start has its own")
    layers = given.pop("start-layers", ())
    made: dict[str, Any] = {SHAPE[flag]: value for flag, value in given.items()}
    if "taps" in made:
        made["taps"] = tuple(made["taps"])
    if "confidence" in made:
        made["confidence"] = False
    return {"shape": Shape(**made), "start_layers": tuple(layers)}


def _given(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(options, name)) is not None}


def _path(text: str | None) -> Path | None:
    return None if text is None else expanded(text, "a path")


def _bytes(gigabytes: float) -> int:
    if not math.isfinite(gigabytes):
        raise ConfigError(f"--cache-limit is {gigabytes}; expected a number of GB")
    return round(gigabytes * 1e9)
