"""Drafts: torch modules, usable on their own. Names are imported when used, so reading configs needs no
torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspark.draft.confidence import AcceptRatePredictor
    from dspark.draft.config import DraftConfig
    from dspark.draft.context import DraftContext
    from dspark.draft.gemma4.model import Gemma4DSparkModel
    from dspark.draft.load import load_draft
    from dspark.draft.markov import GatedMarkovHead, RNNHead, VanillaMarkov
    from dspark.draft.model import DSparkDraftModel

__all__ = [
    "AcceptRatePredictor",
    "DSparkDraftModel",
    "DraftConfig",
    "DraftContext",
    "GatedMarkovHead",
    "Gemma4DSparkModel",
    "RNNHead",
    "VanillaMarkov",
    "load_draft",
]

_MODULES = {
    "AcceptRatePredictor": "confidence",
    "DSparkDraftModel": "model",
    "DraftConfig": "config",
    "DraftContext": "context",
    "GatedMarkovHead": "markov",
    "Gemma4DSparkModel": "gemma4.model",
    "RNNHead": "markov",
    "VanillaMarkov": "markov",
    "load_draft": "load",
}

if not TYPE_CHECKING:  # else a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return getattr(import_module(f"dspark.draft.{_MODULES[name]}"), name)
        raise AttributeError(f"module 'dspark.draft' has no attribute {name!r}")
