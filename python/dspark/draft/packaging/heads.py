"""Which heads a draft has: what the switches say, checked against the tensors."""

from __future__ import annotations

from dataclasses import dataclass

from dspark.checkpoint.weights import WeightFiles
from dspark.draft.config import MARKOV_HEADS
from dspark.draft.packaging.switches import Switches
from dspark.errors import CheckpointError

OLDER_PREFIX = "logit_head."
"""Older nested checkpoints keep the heads in a container of this name."""
BARE = {"markov_head.": "", "confidence_head.proj.": "confidence_proj."}
"""Model-Optimizer keeps them in no container."""

MARKOV_TENSOR = "markov_head.markov_w1.weight"
PARTS = {"gated": "markov_head.gate_proj.weight", "rnn": "markov_head.joint_proj.weight"}
"""The tensor that only this type of Markov head has."""
MODEL_OPTIMIZER_SWITCH = "use_confidence_head"
CONFIDENCE_WEIGHT = "confidence_head.proj.weight"
CONFIDENCE_BIAS = "confidence_head.proj.bias"


@dataclass(frozen=True)
class HeadDefaults:
    """A packaging's defaults of missing switches; None: the switch is required where it matters."""

    markov_head_type: str | None = None
    confidence_head_with_markov: bool = True


@dataclass(frozen=True)
class Heads:
    """The fields of `DraftConfig` about heads."""

    markov_rank: int
    markov_head_type: str | None
    enable_confidence_head: bool
    confidence_head_with_markov: bool
    notes: tuple[str, ...]


def stored_name(weights: WeightFiles, name: str) -> str:
    """The name under which a parameter is stored: its own, or the one that another trainer uses."""
    others = [OLDER_PREFIX + name]
    others += [short + name.removeprefix(long) for long, short in BARE.items() if name.startswith(long)]
    return next((each for each in (name, *others) if each in weights), name)


def read_heads(switches: Switches, weights: WeightFiles, hidden_size: int, defaults: HeadDefaults) -> Heads:
    """
    Raises:
        CheckpointError: a head that is switched on and not stored, stored and not switched on, of an unknown
            type, or with a width that contradicts the switches.
    """
    notes: list[str] = []
    rank, kind = _markov(switches, weights, defaults, notes)
    enabled, with_markov = _confidence(switches, weights, hidden_size, rank, defaults, notes)
    return Heads(rank, kind, enabled, with_markov, tuple(notes))


def _markov(
    switches: Switches, weights: WeightFiles, defaults: HeadDefaults, notes: list[str]
) -> tuple[int, str | None]:
    path = switches.config.path
    said = switches.count("markov_rank")
    rank = said or 0
    stored = stored_name(weights, MARKOV_TENSOR) in weights
    if rank == 0:
        if stored:
            raise CheckpointError(
                f"{path}: markov_rank is {'missing' if said is None else 0}, but {weights.where()} holds "
                f"{stored_name(weights, MARKOV_TENSOR)}"
            )
        return 0, None
    kind = switches.text("markov_head_type")
    if kind is None:
        kind = defaults.markov_head_type
        notes.append(f"markov_head_type is missing: {kind} by the format's default")
    if kind is None:
        raise CheckpointError(f"{path}: markov_rank is {rank}, but markov_head_type is missing")
    kind = kind.lower()
    if kind not in MARKOV_HEADS:
        raise CheckpointError(f"{path}: markov_head_type is {kind!r}; known are {', '.join(MARKOV_HEADS)}")
    for other, part in PARTS.items():
        if other != kind and (name := stored_name(weights, part)) in weights:
            raise CheckpointError(
                f"{path}: markov_head_type is {kind}, but {weights.where()} holds {name}, which only a head "
                f"of type {other} has"
            )
    return rank, kind


def _confidence(
    switches: Switches,
    weights: WeightFiles,
    hidden_size: int,
    rank: int,
    defaults: HeadDefaults,
    notes: list[str],
) -> tuple[bool, bool]:
    path = switches.config.path
    name = stored_name(weights, CONFIDENCE_WEIGHT)
    shape = weights.shape(name)
    enabled = switches.flag("enable_confidence_head", MODEL_OPTIMIZER_SWITCH)
    alpha = switches.number("confidence_head_alpha")
    if enabled is None and alpha is not None:
        enabled = alpha > 0.0  # the weight of its loss in training: above 0, the head exists
    if enabled is None and shape is not None:
        raise CheckpointError(
            f"{path}: enable_confidence_head is missing, but {weights.where()} holds {name}"
        )
    if not enabled:
        return False, False
    said = switches.flag("confidence_head_with_markov")
    default = defaults.confidence_head_with_markov
    if switches.flag(MODEL_OPTIMIZER_SWITCH) is not None:
        default = True  # Model-Optimizer's head has no other form
    wanted = default if said is None else said
    width = hidden_size + (rank if wanted else 0)
    if shape is None:
        raise CheckpointError(
            f"{weights.where()}: enable_confidence_head is true, but tensor {CONFIDENCE_WEIGHT} is missing; "
            f"expected shape {[1, width]}"
        )
    if shape != (1, width):
        raise CheckpointError(
            f"{weights.where()}: tensor {name} has shape {list(shape)}, but with confidence_head_with_markov "
            f"{str(wanted).lower()}{' (the default)' if said is None else ''} and markov_rank {rank} "
            f"it must be {[1, width]}"
        )
    if said is None:
        notes.append(f"confidence_head_with_markov is missing: {str(wanted).lower()} by the format's default")
    if wanted and rank == 0:
        notes.append(
            "confidence_head_with_markov is true without a Markov head: the weight reads no such feature"
        )
    if stored_name(weights, CONFIDENCE_BIAS) not in weights:
        notes.append("the confidence head has no bias: zero by the format's default")
    return True, wanted and rank > 0
