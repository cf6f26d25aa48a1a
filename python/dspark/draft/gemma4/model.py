"""The Gemma 4 draft (`Gemma4DSparkModel`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from dspark.draft.frozen import FrozenDraft
from dspark.draft.gemma4.config import Gemma4DraftConfig
from dspark.draft.gemma4.frozen import FrozenGemma4Draft
from dspark.draft.model import DSparkDraftModel
from dspark.errors import ConfigError
from dspark.layers.decoder import KeysValues
from dspark.target.gemma4.layer import (
    Gemma4Layer,
    Gemma4LayerShape,
    embedding_scale,
    gemma4_layers,
    soft_capped,
)


class Gemma4DSparkModel(DSparkDraftModel):
    """A `DSparkDraftModel` on Gemma 4 layers, all of them full.

    Its embeddings are stored as the target's are and scaled when read. The soft cap applies to the base
    logits, to which the Markov bias is then added uncapped. It does not touch the hidden states, which the
    confidence head reads.
    """

    config: Gemma4DraftConfig

    def __init__(self, config: Gemma4DraftConfig) -> None:
        if not (config.own_embeddings and config.own_head):
            raise ConfigError("a Gemma 4 draft has embeddings and output head of its own")
        super().__init__(config)

    def _build_layers(self) -> nn.ModuleList:
        config = self.config
        shape = Gemma4LayerShape(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            bias=config.attention_bias,
            shared_values=config.shared_values,
        )
        return nn.ModuleList(Gemma4Layer(shape) for _ in range(config.num_hidden_layers))

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings `[rows, hidden]` of token ids `[rows]`, times sqrt(hidden)."""
        rows = super().embed(token_ids)
        return rows * embedding_scale(self.config.hidden_size, rows.dtype)

    def project(self, hidden: Tensor) -> Tensor:
        """Base logits `[rows, vocabulary]` of the backbone's output `[rows, hidden]`, soft-capped."""
        return soft_capped(super().project(hidden), self.config.final_logit_softcapping)

    def _frozen_parts(self, head: nn.Linear | None, fill: Callable[[str], None]) -> FrozenDraft:
        layers = gemma4_layers(self.layers)
        return FrozenGemma4Draft(self.fc, self.hidden_norm, layers, self.norm, self.embed_tokens, head, fill)

    def _attentions(self) -> Sequence[KeysValues]:
        return [layer.self_attn for layer in gemma4_layers(self.layers)]
