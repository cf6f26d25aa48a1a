"""A causal model of transformers as a target."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.errors import ConfigError
from dspark.kernels import Choice
from dspark.target.adapter.cache import AdaptedCache
from dspark.target.adapter.config import AdaptedConfig
from dspark.target.adapter.head import LentHead
from dspark.target.passes import check_pass

CACHE_ARGUMENTS = ("cache", "past_key_values")
"""What a forward calls its argument for the key/value cache: the new name, then the old one."""


class TransformersTarget(nn.Module):
    """Serves the `Target` interface from a transformers model.

    Each request has a cache of its own and runs in a forward of its own: packed rows of several requests
    would need a mask that not every architecture accepts. So a batch shares no weight reads, and costs what
    its requests cost one by one.

    Taps come from `output_hidden_states`: the embeddings (as they enter the first layer), then every layer's
    output. The last entry is after the final norm in transformers, and no draft taps the last layer.
    """

    forks_at_parts = False

    def __init__(
        self, model: Any, config: AdaptedConfig, new_states: Callable[[], Any], version: str
    ) -> None:
        """`new_states` makes an empty cache; `version` is that of transformers; the probe sets `head`,
        `position_bytes`, and `unforkable` where copies of a cache are not exact."""
        super().__init__()
        self.model = model
        self.config = config
        self.version = version
        self.head: LentHead | None = None
        self.unforkable: str | None = None
        self.position_bytes = 0
        self._new_states = new_states
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = next((name for name in CACHE_ARGUMENTS if name in parameters), None)
        self._keeps = "logits_to_keep" in parameters

    @property
    def runs_through(self) -> str:
        """Whose code computes the passes, and what that costs, in words."""
        told = f"transformers {self.version} ({self.config.architecture}), one forward per request"
        return told if self.config.limit is None else f"{told}; {self.config.limit}"

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding_weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The embeddings' dtype, and that of taps."""
        return self.embedding_weight.dtype

    @property
    def embedding_weight(self) -> Tensor:
        """`[vocabulary, hidden]`, as stored."""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings `[rows, hidden]` of token ids `[rows]`, as stored.

        They exclude what a model does to them afterwards (a factor, learned positions): some versions of
        transformers do it inside the embedding module and some outside, and drafts are trained on the
        stored rows.
        """
        return F.embedding(token_ids, self.embedding_weight)

    def project(self, hidden: Tensor) -> Tensor:
        """Logits `[rows, vocabulary]` of normed hidden states `[rows, hidden]`.

        Raises:
            ConfigError: the model's head cannot be lent.
        """
        if self.head is None:
            raise ConfigError(f"{self.config.architecture}: the output head was not checked yet")
        return self.head(hidden)

    @property
    def refuses_to_lend(self) -> dict[str, str]:
        """What a draft cannot take from this target ("embeddings", "output head"), and why."""
        refusals = {}
        width = self.embedding_weight.shape[1]
        if width != self.config.hidden_size:
            refusals["embeddings"] = (
                f"{self.config.architecture} embeds in {width} dimensions, not in {self.config.hidden_size}"
            )
        if self.head is not None and self.head.refusal is not None:
            refusals["output head"] = self.head.refusal
        return refusals

    def use_kernels(self, choice: Choice) -> dict[str, str]:
        """Returns no roles: the passes are not ours."""
        return {}

    def new_cache(self) -> AdaptedCache:
        """An empty cache for one request."""
        forks = self.unforkable is None
        return AdaptedCache(self._new_states(), forks=forks, position_bytes=self.position_bytes)

    def forward(
        self,
        token_ids: Tensor,
        segments: Sequence[tuple[AdaptedCache, int]],
        taps: Sequence[int] = (),
        logits: str = "all",
    ) -> tuple[Tensor, Tensor | None]:
        """See `Target.__call__`; one forward for each segment."""
        self._check(token_ids, segments, taps, logits)
        pieces = torch.split(token_ids, [n for _, n in segments])
        outputs = [
            self._one(ids, cache, taps, logits) for ids, (cache, _) in zip(pieces, segments, strict=True)
        ]
        rows = [row for row, _ in outputs]
        tapped = [tap for _, tap in outputs if tap is not None]
        return _joined(rows), _joined(tapped) if tapped else None

    def _one(
        self, ids: Tensor, cache: AdaptedCache, taps: Sequence[int], logits: str
    ) -> tuple[Tensor, Tensor | None]:
        cache.begin()
        hidden = logits == "hidden"
        output = self.run(ids, cache, hidden_states=bool(taps) or hidden, last=logits == "last")
        cache.wrote(len(ids))
        rows = output.hidden_states[-1][0] if hidden else output.logits[0]
        tapped = torch.cat([output.hidden_states[tap + 1][0] for tap in taps], dim=-1) if taps else None
        return rows[-1:] if logits == "last" else rows, tapped

    def run(self, ids: Tensor, cache: AdaptedCache, *, hidden_states: bool, last: bool) -> Any:
        """The model's own output for the tokens `ids` `[rows]` after those in a cache."""
        options: dict[str, Any] = {"use_cache": True, "return_dict": True}
        if self._cache_name is None:
            raise ConfigError(
                f"{self.config.architecture} cannot be a target: its forward takes no key/value cache"
            )
        options[self._cache_name] = cache.states
        if hidden_states:
            options["output_hidden_states"] = True
        if last and self._keeps:
            options["logits_to_keep"] = 1
        return self.model(input_ids=ids[None], **options)

    def _check(
        self,
        token_ids: Tensor,
        segments: Sequence[tuple[AdaptedCache, int]],
        taps: Sequence[int],
        logits: str,
    ) -> None:
        check_pass(token_ids, segments, logits)
        for tap in taps:
            if not -1 <= tap < self.config.num_hidden_layers - 1:
                raise ConfigError(
                    f"layer {tap} cannot be tapped: only -1 (embeddings) to "
                    f"{self.config.num_hidden_layers - 2} can"
                )


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
