"""Drafts: torch modules, usable on their own."""

from dspark.draft.confidence import AcceptRatePredictor
from dspark.draft.config import DraftConfig
from dspark.draft.context import DraftContext
from dspark.draft.load import load_draft
from dspark.draft.markov import GatedMarkovHead, RNNHead, VanillaMarkov
from dspark.draft.model import DSparkDraftModel

__all__ = [
    "AcceptRatePredictor",
    "DSparkDraftModel",
    "DraftConfig",
    "DraftContext",
    "GatedMarkovHead",
    "RNNHead",
    "VanillaMarkov",
    "load_draft",
]
