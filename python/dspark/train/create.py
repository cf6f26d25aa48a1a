"""A draft to train: new, or from a checkpoint, with the target's embeddings and head frozen in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from dspark.checkpoint.load import on_meta, read_tensor
from dspark.checkpoint.weights import WeightFiles
from dspark.draft import DSparkDraftModel
from dspark.draft.config import DraftConfig
from dspark.draft.gemma4.config import Gemma4DraftConfig
from dspark.draft.packaging import read_draft_directory
from dspark.draft.packaging.common import WIDEST_BLOCK
from dspark.draft.parameters import draft_shapes, stored_parameters
from dspark.draft.vocabulary import OFFSETS, read_target_ids
from dspark.errors import ConfigError
from dspark.train.head import embeddings_and_head

FROZEN = ("embed_tokens.", "lm_head.")
"""Prefixes of the names of parameters that stay the target's (paper, section 3.3)."""

COMPARED_ROWS = 4096
"""Rows of stored embeddings or head compared at a time."""

SPREAD = 0.02
"""Standard deviation of new matrices, the `initializer_range` of the published configurations."""


def new_draft(
    config: DraftConfig,
    target: Path,
    target_ids: Tensor | None,
    seed: int,
    start_layers: Sequence[int] = (),
) -> DSparkDraftModel:
    """A draft with random matrices, norms of 1 and biases of 0, in float32 on the CPU.

    `target` is the target's directory; `target_ids` the ascending tokens of a reduced vocabulary;
    `start_layers` the target's layers from which the draft's are copied, one for each, or none.
    """
    with on_meta():
        draft = DSparkDraftModel(config)
    generator = torch.Generator().manual_seed(seed)
    own = {}
    for name, parameter in draft.named_parameters():
        if name.startswith(FROZEN):
            continue
        value = torch.zeros(parameter.shape)
        if parameter.dim() == 2:
            value.normal_(0.0, SPREAD, generator=generator)
        elif name.endswith("norm.weight"):
            value.fill_(1.0)
        own[name] = value
    if start_layers:
        own |= _copied_layers(config, target, start_layers)
    return _filled(draft, own, target, target_ids)


def _copied_layers(config: DraftConfig, target: Path, layers: Sequence[int]) -> dict[str, Tensor]:
    """The tensors of the target's layers and its final norm under the draft's names; norms of queries and
    keys stay new where the target has none."""
    check_start_layers(config, layers)
    weights = WeightFiles.open(target)
    norm = weights.check("model.norm.weight", (config.hidden_size,))
    found = {"norm.weight": read_tensor(norm).float()}
    shapes = draft_shapes(config)
    for ours, theirs in enumerate(layers):
        prefix = f"layers.{ours}."
        for name, shape in shapes.items():
            stored = f"model.layers.{theirs}.{name.removeprefix(prefix)}"
            optional = name.endswith(("q_norm.weight", "k_norm.weight"))
            if name.startswith(prefix) and not (optional and stored not in weights):
                found[name] = read_tensor(weights.check(stored, shape)).float()
    return found


def check_start_layers(config: DraftConfig, layers: Sequence[int]) -> None:
    """
    Raises:
        ConfigError: there are not as many as the draft has, or some are not layers of the target.
    """
    count, theirs = config.num_hidden_layers, config.num_target_layers
    if len(layers) != count or not all(0 <= layer < (theirs or layer + 1) for layer in layers):
        raise ConfigError(
            f"start_layers {list(layers)} must name {count} layers of the target's {theirs} (from 0), one "
            "for each of the draft's"
        )


def trainable(path: Path, training_block_size: int | None = None) -> tuple[DraftConfig, WeightFiles]:
    """The configuration of a draft that can be trained, and its files; no weights are read.

    `training_block_size`: another width to train at, None: its own.

    Raises:
        CheckpointError: it cannot be read.
        ConfigError: a kind of draft that cannot be trained.
    """
    config, weights = read_draft_directory(path)
    if isinstance(config, Gemma4DraftConfig):
        raise ConfigError(f"{path}: drafts of Gemma 4 layers cannot be trained")
    if config.drop_anchor_slot:
        raise ConfigError(f"{path}: a draft whose anchor slot predicts nothing cannot be trained")
    if any(config.windows):
        raise ConfigError(f"{path}: a draft with sliding layers cannot be trained")
    if config.causal:
        raise ConfigError(f"{path}: a draft whose rows do not see later ones cannot be trained")
    if config.hidden_size != config.target_hidden_size:
        raise ConfigError(f"{path}: a draft that is not as wide as its target cannot be trained")
    if training_block_size is None:
        return config, weights
    if not config.block_size <= training_block_size <= WIDEST_BLOCK:
        raise ConfigError(
            f"training_block_size is {training_block_size}; expected {config.block_size} (the draft's "
            f"block_size) to {WIDEST_BLOCK}"
        )
    return dataclasses.replace(config, training_block_size=training_block_size), weights


def draft_from(path: Path, target: Path, training_block_size: int | None = None) -> DSparkDraftModel:
    """The draft of a checkpoint, to continue its training; arguments and errors as in `trainable`."""
    config, weights = trainable(path, training_block_size)
    target_ids = check_start(path, target)
    with on_meta():
        draft = DSparkDraftModel(dataclasses.replace(config, own_embeddings=True, own_head=True))
    stored = stored_parameters(config, weights)
    own = {name: read_tensor(one).float() for name, one in stored.items() if not name.startswith(FROZEN)}
    for name, parameter in draft.named_parameters():
        if name not in own and not name.startswith(FROZEN):
            own[name] = torch.zeros(parameter.shape)  # an absent bias of the confidence head means zero
    return _filled(draft, own, target, target_ids)


def check_start(path: Path, target: Path) -> Tensor | None:
    """The target's tokens in a draft's reduced vocabulary; None without one. Embeddings and head that the
    draft stores are compared with the target's own, up to rounding.

    Raises:
        CheckpointError: it cannot be read.
        ConfigError: its vocabulary does not ascend, or training would replace its embeddings or head by
            different ones.
    """
    config, weights = trainable(path)
    ids = None
    if OFFSETS in weights:
        ids = torch.from_numpy(read_target_ids(weights.tensors[OFFSETS], config.vocab_size))
        if not bool((ids.diff() > 0).all()):
            instead = "`dspark export` it first" if config.reduced else "such a draft cannot be trained"
            raise ConfigError(f"{path}: its vocabulary does not ascend; {instead}")
    ids = ids if config.reduced else None
    own = {name: one for name, one in stored_parameters(config, weights).items() if name.startswith(FROZEN)}
    if own:
        theirs = embeddings_and_head(target, (config.vocab_size, config.hidden_size), ids)
        for name, wanted in zip(FROZEN, theirs, strict=True):
            stored = own.get(name + "weight")
            if stored is not None and not _equal(read_tensor(stored), wanted):
                raise ConfigError(
                    f"{path}: its {name}weight is not the target's, which training would use: name the "
                    "target that it was made for"
                )
    return ids


def _equal(stored: Tensor, wanted: Tensor) -> bool:
    """Whether both are equal, up to rounding of each to 16 bits."""
    return all(
        torch.allclose(one.float(), other, rtol=2**-7, atol=1e-6)
        for one, other in zip(
            torch.split(stored, COMPARED_ROWS), torch.split(wanted, COMPARED_ROWS), strict=True
        )
    )


def _filled(
    draft: DSparkDraftModel, own: dict[str, Tensor], target: Path, target_ids: Tensor | None
) -> DSparkDraftModel:
    config = draft.config
    embeddings, head = embeddings_and_head(target, (config.vocab_size, config.hidden_size), target_ids)
    values = own | {"embed_tokens.weight": embeddings, "lm_head.weight": head}
    for name, value in values.items():
        owner, _, leaf = name.rpartition(".")
        trained = not name.startswith(FROZEN)
        setattr(draft.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=trained))
    draft.target_ids = target_ids
    return draft.train()


def trained_parameters(draft: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that training changes, by name."""
    return {name: p for name, p in draft.named_parameters() if p.requires_grad}
