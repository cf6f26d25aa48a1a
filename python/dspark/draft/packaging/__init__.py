"""The packagings of drafts. Each has one file with `recognise` and `read`; a new one needs such a file and a
line here."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from dspark.checkpoint.config_file import ConfigFile
from dspark.checkpoint.weights import WeightFiles
from dspark.draft.config import DraftConfig
from dspark.draft.packaging import dflash, flat, gemma4, nested, speculators
from dspark.draft.packaging.refusals import refuse_unsupported
from dspark.errors import CheckpointError


class Packaging(Protocol):
    """What the module of a packaging offers."""

    def recognise(self, config: ConfigFile, weights: WeightFiles) -> bool:
        """Whether this is the packaging, judged by content."""

    def read(self, config: ConfigFile, weights: WeightFiles) -> DraftConfig:
        """Reads a checkpoint that `recognise` accepts."""


PACKAGINGS: tuple[Packaging, ...] = (flat, nested, speculators, dflash, gemma4)


def read_draft(config: ConfigFile, weights: WeightFiles) -> DraftConfig:
    """Reads whatever packaging this is: recognised by what the config and the weights hold, never by a guess.

    Raises:
        CheckpointError: unknown or unsupported (what was seen is named), incomplete or contradictory.
    """
    refuse_unsupported(config, weights)
    readers = [packaging for packaging in PACKAGINGS if packaging.recognise(config, weights)]
    if len(readers) != 1:
        raise CheckpointError(
            f"{config.path}: not a known draft; seen: architectures {config.architectures() or 'missing'}, "
            f"{_presence('dflash_config', config.raw('dflash_config') is not None)}, "
            f"{_presence('top-level target_layer_ids', config.raw('target_layer_ids') is not None)}, "
            f"{_presence('fc.weight', 'fc.weight' in weights)}, "
            f"{_presence('embed_tokens.weight', 'embed_tokens.weight' in weights)}"
        )
    return readers[0].read(config, weights)


def read_draft_directory(path: Path) -> tuple[DraftConfig, WeightFiles]:
    """`read_draft` of a directory; no weights are read."""
    config = ConfigFile.read(path / "config.json")
    weights = WeightFiles.open(path)
    return read_draft(config, weights), weights


def _presence(what: str, there: bool) -> str:
    return what if there else f"no {what}"
