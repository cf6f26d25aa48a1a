"""Checks before anything is generated, computed or loaded: a later refusal would waste hours."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from dspark.devices import parse_device, parse_dtype, warn_if_slow
from dspark.draft.config import DraftConfig
from dspark.draft.export.borrowed import borrowed_tensors
from dspark.errors import ConfigError
from dspark.pretrained import resolve
from dspark.target.load import read_target_config
from dspark.target.protocol import TargetSizes
from dspark.text import Tokenizer
from dspark.train.cache import check_owner
from dspark.train.create import check_start, check_start_layers, trainable
from dspark.train.data.generate import read_prompts, user_tags
from dspark.train.data.read import read_conversations
from dspark.train.gather import SELF_MADE, directories, marks_of, read_openers
from dspark.train.identity import difference, identity, named
from dspark.train.muon import check_muon
from dspark.train.save import check_packaging, packaging_of
from dspark.train.settings import Settings
from dspark.train.shape import draft_config, mask_token


def check_first(
    settings: Settings,
    target: Path,
    tokenizer: Tokenizer | None,
    processes: int,
    state: dict[str, Any] | None,
) -> TargetSizes:
    """Runs all checks that need no model; returns the target's configuration.

    Raises:
        ConfigError: names the setting, what was expected and what was found.
        CheckpointError: the target or the draft to start from cannot be read, or the cache of hidden states
            is another teacher's.
        RequestError: the prompts cannot be read.
    """
    content = identity(target)
    check_curve(settings, state, content)
    if settings.pace.sequences % processes:
        raise ConfigError(
            f"{settings.pace.sequences} sequences per step are not a multiple of the {processes} processes"
        )
    if settings.muon:
        check_muon(sharded=settings.parallel == "fsdp" and processes > 1)
    if settings.bf16:
        warn_if_slow("bf16", torch.bfloat16, parse_device(settings.device))
    if settings.tensorboard and find_spec("tensorboard") is None:
        raise ConfigError("TensorBoard is not installed: pip install tensorboard")
    sizes = read_target_config(target)
    if settings.start is None and settings.shape.mask_token_id is None and state is None:
        mask_token(tokenizer, ())
    borrowed_tensors(target, (sizes.vocab_size, sizes.hidden_size))
    config = _planned(settings, target, sizes)
    if settings.data.cache is not None:
        whose: dict[str, Any] = {**named(settings.target, content), "taps": list(config.target_layer_ids)}
        if settings.dtype != "auto":
            whose["dtype"] = str(parse_dtype(settings.dtype))
        check_owner(settings.data.cache, whose)
    check_packaging(packaging_of(settings.packaging, config.reduced), config.reduced, settings.save_head)
    if settings.failed_anchors and settings.data.draft is None and not settings.data.files:
        raise ConfigError(
            f"failed_anchors is {settings.failed_anchors}, but answers generated without a draft do not say "
            "where a verify pass failed: give --generate-with DRAFT"
        )
    _check_places(settings)
    if directories(settings):
        check_generation(settings, tokenizer)
        for _ in read_conversations(settings.data.files, marks_of(tokenizer), sizes.vocab_size):
            pass  # bad ones are named now, not after hours
    return sizes


def check_generation(settings: Settings, tokenizer: Tokenizer | None) -> None:
    """
    Raises:
        ConfigError: the target has no tokenizer, or no chat template that can render what is asked.
        RequestError: the prompts cannot be read.
    """
    data = settings.data
    asked = [] if data.prompts is None else read_prompts(data.prompts, 1)
    read_openers(data.openers)
    if tokenizer is None:
        raise ConfigError(f"{settings.target}: a target without a tokenizer cannot answer prompts")
    if tokenizer.has_chat_template:
        if data.self_prompts:
            user_tags(tokenizer)
        return
    if data.self_prompts:
        raise ConfigError(f"{settings.target}: a target without a chat template cannot make up prompts")
    if any(len(one.turns) > 1 for one in asked):
        raise ConfigError(
            f"{data.prompts}: has prompts of several turns, but {settings.target} has no chat template to "
            "join them"
        )


def _check_places(settings: Settings) -> None:
    data = settings.data
    if data.prompts is not None and data.self_prompts and data.prompts.stem == SELF_MADE:
        raise ConfigError(f"{data.prompts}: this name is reserved for made-up prompts: rename the file")
    for place in filter(None, (settings.output, data.cache)):
        for folder in filter(Path.is_dir, data.files):
            if place.resolve().is_relative_to(folder.resolve()):
                raise ConfigError(
                    f"{place} is inside {folder}, which --data reads whole: name another place, or files"
                )


def _planned(settings: Settings, target: Path, sizes: TargetSizes) -> DraftConfig:
    """The draft's configuration; if its mask is yet to be found in the data, any token stands for it."""
    if settings.start is not None:
        start = resolve(settings.start, "draft")
        config, _ = trainable(start, settings.shape.training_block_size)
        found = config.vocab_size, config.target_hidden_size
        if found != (sizes.vocab_size, sizes.hidden_size):
            raise ConfigError(
                f"{start}: made for a target of {found[0]} tokens and hidden size {found[1]}, but this one "
                f"has {sizes.vocab_size} and {sizes.hidden_size}"
            )
        if max(config.target_layer_ids) >= sizes.num_hidden_layers:
            raise ConfigError(
                f"{start}: reads layer {max(config.target_layer_ids)}, but the target has only "
                f"{sizes.num_hidden_layers} layers"
            )
        check_start(start, target)
        return config
    shape = settings.shape
    mask = shape.mask_token_id
    config = draft_config(dataclasses.replace(shape, mask_token_id=0 if mask is None else mask), sizes)
    if settings.start_layers:
        check_start_layers(config, settings.start_layers)
    return config


def check_curve(settings: Settings, state: dict[str, Any] | None, target_content: str) -> None:
    """
    Raises:
        ConfigError: the run in `output` has other settings, and changes are not accepted.
    """
    if state is None or settings.accept_changes:
        return
    if odd := difference(state["run"]["curve"], settings.curve(target_content)):
        raise ConfigError(
            f"{settings.output}: the run there has {odd}: give --accept-changes or another directory"
        )
