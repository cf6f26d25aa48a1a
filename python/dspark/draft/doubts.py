"""What can be wrong with a draft that loads: its tokens would hardly ever be accepted, and nothing else would
show why."""

from __future__ import annotations

import logging
from collections.abc import Collection

from dspark.checkpoint.untrained import warn_if_untrained
from dspark.checkpoint.unused import some_of, unused_tensors
from dspark.checkpoint.weights import WeightFiles
from dspark.draft.config import DraftConfig
from dspark.draft.packaging.slots import UNSAID
from dspark.draft.vocabulary import OFFSETS

_log = logging.getLogger("dspark")

LEFTOVERS = (OFFSETS, "t2d", "verifier_", "optimizer")
"""Starts of the names of tensors that trainers leave in checkpoints and no draft reads; `rotary_emb` may
stand anywhere in such a name."""


def warn_of_doubts(config: DraftConfig, weights: WeightFiles, read: Collection[str]) -> None:
    """Logs a warning for each doubt; `read` are the stored names of the parameters.

    Raises `CheckpointError` for a file that cannot be read.
    """
    warn_if_untrained(weights, read)
    for note in config.notes:
        if note in UNSAID.values():
            _log.warning("%s: %s", weights.directory, note)
    unused = [name for name in unused_tensors(weights, read, LEFTOVERS) if "rotary_emb" not in name]
    if unused:
        _log.warning(
            "%s: %d tensors of the draft are not used: %s; if it needs them, next to none of its drafts are "
            "accepted",
            weights.directory,
            len(unused),
            some_of(unused),
        )
