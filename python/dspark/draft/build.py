"""Which module a configuration builds."""

from __future__ import annotations

from dspark.draft.config import DraftConfig
from dspark.draft.gemma4.config import Gemma4DraftConfig
from dspark.draft.gemma4.model import Gemma4DSparkModel
from dspark.draft.model import DSparkDraftModel


def build_draft(config: DraftConfig) -> DSparkDraftModel:
    """The draft of a configuration, with weights as torch initialises them."""
    if isinstance(config, Gemma4DraftConfig):
        return Gemma4DSparkModel(config)
    return DSparkDraftModel(config)
