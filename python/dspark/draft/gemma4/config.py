"""The configuration of a Gemma 4 draft: what it adds to that of every draft."""

from __future__ import annotations

from dataclasses import dataclass

from dspark.draft.config import DraftConfig
from dspark.target.gemma4.config import KindHeads


@dataclass(frozen=True, kw_only=True)
class Gemma4DraftConfig(DraftConfig):
    """
    Attributes:
        shared_values: there is no v_proj, values come from k_proj.
        final_logit_softcapping: caps the base logits, before the Markov bias; None: no cap.
    """

    shared_values: bool
    final_logit_softcapping: float | None

    @property
    def heads(self) -> KindHeads:
        """Every layer has the heads of the target's full layers."""
        return KindHeads(self.head_dim, self.num_key_value_heads, self.shared_values)
