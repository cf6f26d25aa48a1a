"""Loading a draft from a checkpoint directory."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dspark.checkpoint.load import ParameterReader, Progress, on_meta, resolve_dtype
from dspark.draft.build import build_draft
from dspark.draft.config import DraftConfig
from dspark.draft.doubts import warn_of_doubts
from dspark.draft.model import DSparkDraftModel
from dspark.draft.packaging import read_draft_directory
from dspark.draft.packaging.heads import CONFIDENCE_BIAS, stored_name
from dspark.draft.parameters import stored_parameters
from dspark.draft.vocabulary import OFFSETS, read_target_ids
from dspark.errors import CheckpointError, ConfigError
from dspark.layers.half import is_fast
from dspark.target.protocol import Target


def load_draft(
    path: str | os.PathLike[str],
    *,
    target: Target | None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str = "auto",
    progress: Progress | None = None,
    block_size: int | None = None,
) -> DSparkDraftModel:
    """Loads, binds and freezes a draft of any packaging.

    Args:
        path: directory with config.json and safetensors weights, single or sharded.
        target: lends embeddings and output head to a draft that has none of its own. None only for a draft
            with both.
        dtype: "auto" keeps the checkpoint's where the target's is wider and this machine multiplies fast in
            the checkpoint's; else it is the target's, or float32 where a 16-bit one is slow. A draft's
            precision changes what is accepted, never the distribution of the text.
        progress: called with bytes read so far and in all.
        block_size: tokens to draft per block. Up to the checkpoint's it changes nothing here (a prefix of the
            block is used); beyond that the block is widened, at most to its training width.

    Raises:
        CheckpointError: names the file, the key or tensor, what was expected and what was found.
        ConfigError: the draft does not fit the target, or the block size is out of range.
    """
    config, weights = read_draft_directory(Path(path))
    if block_size is not None:
        config = widened(config, block_size)
    if target is None and not (config.own_embeddings and config.own_head):
        raise CheckpointError(
            f"{weights.where()}: the draft has no {'output head' if config.own_embeddings else 'embeddings'} "
            "of its own, and there is no target to borrow from"
        )
    stored = stored_parameters(config, weights)  # refuses before anything of these sizes is allocated
    warn_of_doubts(config, weights, {tensor.name for tensor in stored.values()})
    with on_meta():
        model = build_draft(config)
    names = {name: stored_name(weights, name) for name, _ in model.named_parameters()}
    place = torch.device(device)
    element = resolve_dtype(dtype, weights, names)
    if dtype == "auto":
        element = _auto_dtype(element, target, place)
    if model.confidence_head is not None and names[CONFIDENCE_BIAS] not in weights:
        del names[CONFIDENCE_BIAS]
        zero = torch.zeros(1, dtype=element, device=place)
        model.confidence_head.proj.bias = nn.Parameter(zero, requires_grad=False)
    reader = ParameterReader(model, weights, names, place, element, progress)
    reader.vectors()  # norms determine device and dtype
    if config.reduced or OFFSETS in weights:
        _place_vocabulary(model, reader, read_target_ids(weights.tensors[OFFSETS], config.vocab_size))
    if target is not None:
        model.bind(target)
    model.eval().freeze(reader.fill)
    reader.fill("")
    return model


def _place_vocabulary(model: DSparkDraftModel, reader: ParameterReader, tokens: NDArray[np.int64]) -> None:
    """Sets `target_ids`. The core needs them in ascending order: if they are not, the rows of output head and
    W2 are reordered once."""
    order = np.argsort(tokens)
    if (order == np.arange(len(order))).all():
        if not model.config.reduced:
            return  # every token stands for itself
    else:
        reader.reorder("lm_head.weight", torch.from_numpy(order))
        reader.reorder("markov_head.markov_w2.weight", torch.from_numpy(order))
        if not (model.config.reduced or model.config.own_head):
            raise CheckpointError(
                f"{model.config.packaging} draft: {OFFSETS} permutes the whole vocabulary, but the output "
                "head is the target's"
            )
    if model.config.reduced:
        model.target_ids = torch.from_numpy(tokens[order]).to(model.device)


def _auto_dtype(stored: torch.dtype, target: Target | None, device: torch.device) -> torch.dtype:
    if target is None or (stored.itemsize < target.dtype.itemsize and is_fast(stored, device)):
        return stored
    if target.dtype.itemsize < torch.float32.itemsize and not is_fast(target.dtype, device):
        return torch.float32
    return target.dtype


def widened(config: DraftConfig, block_size: int) -> DraftConfig:
    """The configuration that drafts at least `block_size` tokens per block.

    Raises:
        ConfigError: less than 1, or more than the weights have been trained for.
    """
    anchor = config.block_size - config.gamma
    if not 1 <= block_size <= config.training_block_size - anchor:
        raise ConfigError(
            f"block_size {block_size} is out of range: this draft was trained to draft 1 to "
            f"{config.training_block_size - anchor} tokens per block"
        )
    if block_size <= config.gamma:
        return config
    return dataclasses.replace(config, block_size=block_size + anchor)
