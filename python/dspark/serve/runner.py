"""Torch's side of the engine: the five passes that the Rust core asks for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.draft import DraftContext, DSparkDraftModel
from dspark.errors import ConfigError
from dspark.target.protocol import Target, TargetCache


class Runner:
    """Target, draft and their caches by request id.

    Logits leave as CPU tensors with unit column stride, which the core reads in place; on another device they
    are copied to the host first. The engine calls it from one thread under `torch.inference_mode`.
    """

    def __init__(self, target: Target, draft: DSparkDraftModel | None) -> None:
        self.target = target
        self.draft_model = draft
        self.taps: Sequence[int] = draft.config.target_layer_ids if draft is not None else ()
        self.needs_hidden = draft is not None and (
            draft.confidence_head is not None or draft.config.markov_head_type in ("gated", "rnn")
        )
        self._caches: dict[int, TargetCache] = {}
        self._contexts: dict[int, DraftContext] = {}
        self._verified: list[tuple[int, int]] = []
        self._verified_taps: Tensor | None = None

    def prefill(self, ids: list[int], parts: list[list[int]], drafts: list[bool]) -> Tensor:
        """Runs the next part of each prompt; returns logits `[requests, vocabulary]` of their last tokens.

        A request is known from its first part on. Only requests that draft get a draft context.
        """
        for request, drafting in zip(ids, drafts, strict=True):
            if request in self._caches:
                continue
            self._caches[request] = self.target.new_cache()
            if drafting and self.draft_model is not None:
                self._contexts[request] = self.draft_model.new_context()
        rows = [self._prefill_one(request, part) for request, part in zip(ids, parts, strict=True)]
        return self._to_host(torch.cat(rows) if len(rows) > 1 else rows[0])

    def _prefill_one(self, request: int, part: list[int]) -> Tensor:
        cache, context = self._caches[request], self._contexts.get(request)
        logits: Tensor
        wanted = self.taps if context is not None else ()
        logits, taps = self.target(self._ids(part), [(cache, len(part))], wanted, logits="last")
        cache.advance(len(part))
        if context is not None and taps is not None and self.draft_model is not None:
            self.draft_model.extend([(context, len(part))], taps)
        return logits

    def draft(self, ids: list[int], anchors: list[int]) -> tuple[Tensor, Tensor | None]:
        """One block per request: base logits `[requests * gamma, vocabulary]` and, if a head reads them, the
        hidden states `[requests * gamma, hidden]`."""
        if self.draft_model is None:
            raise ConfigError("a draft pass was asked of a runner without a draft")
        contexts = [self._contexts[request] for request in ids]
        hidden, base = self.draft_model.block(anchors, contexts)
        return self._to_host(base), self._to_host(hidden) if self.needs_hidden else None

    def verify(self, ids: list[int], tokens: list[int], lengths: list[int]) -> Tensor:
        """The target over packed rows; returns logits `[rows, vocabulary]`. Caches do not advance."""
        segments = [(self._caches[request], n) for request, n in zip(ids, lengths, strict=True)]
        taps = self.taps if any(request in self._contexts for request in ids) else ()
        logits, self._verified_taps = self.target(self._ids(tokens), segments, taps)
        self._verified = list(zip(ids, lengths, strict=True))
        return self._to_host(logits)

    def commit(self, ids: list[int], kept: list[int]) -> None:
        """Keeps the first rows of each request's part of the last verify pass."""
        keep = dict(zip(ids, kept, strict=True))
        for request, n in keep.items():
            self._caches[request].advance(n)
        taps, self._verified_taps = self._verified_taps, None
        grown = [(self._contexts[request], n) for request, n in keep.items() if request in self._contexts]
        if self.draft_model is not None and taps is not None and grown:
            self.draft_model.extend(grown, self._kept_rows(taps, keep))

    def _kept_rows(self, taps: Tensor, keep: dict[int, int]) -> Tensor:
        """The taps of the rows that are kept, of the requests that draft."""
        if len(self._verified) == 1:
            return taps[: keep[self._verified[0][0]]]
        pieces, start = [], 0
        for request, length in self._verified:
            if request in keep and request in self._contexts:
                pieces.append(taps[start : start + keep[request]])
            start += length
        return torch.cat(pieces)

    def release(self, ids: list[int]) -> None:
        """Forgets requests."""
        for request in ids:
            self._caches.pop(request, None)
            self._contexts.pop(request, None)

    def _ids(self, tokens: list[int]) -> Tensor:
        return torch.tensor(tokens, dtype=torch.int64, device=self.target.device)

    @staticmethod
    def _to_host(rows: Tensor) -> Tensor:
        return rows if rows.device.type == "cpu" else rows.cpu()
