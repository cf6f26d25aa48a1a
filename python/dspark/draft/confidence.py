"""The confidence head: how likely a drafted token is to be accepted, given that those before it were."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dspark.draft.markov import VanillaMarkov
from dspark.errors import ConfigError


class AcceptRatePredictor(nn.Module):
    """c_k = sigmoid(w [h_k; W1[x_{k-1}]] + b), with or without the Markov feature (paper, section 3.3)."""

    def __init__(self, hidden_size: int, markov_rank: int = 0) -> None:
        """`markov_rank` 0: the head reads the hidden state alone."""
        super().__init__()
        self.with_markov = markov_rank > 0
        self.proj = nn.Linear(hidden_size + markov_rank, 1)

    def forward(
        self, hidden: Tensor, previous: Tensor | None = None, markov: VanillaMarkov | None = None
    ) -> Tensor:
        """Logits `[...]` (before the sigmoid) of hidden states `[..., hidden]`.

        `previous` `[...]`, the token before each slot, and the Markov head are read only with the Markov
        feature.
        """
        if self.with_markov:
            if previous is None or markov is None:
                raise ConfigError(
                    "this confidence head reads the Markov feature: give it tokens and Markov head"
                )
            hidden = torch.cat((hidden, markov.features(previous).to(hidden.dtype)), dim=-1)
        return self.proj(hidden).squeeze(-1)  # type: ignore[no-any-return]
