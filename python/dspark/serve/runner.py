"""Torch's side of the engine: the passes that the Rust core asks for, and the caches behind them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.draft import DSparkDraftModel
from dspark.errors import ConfigError
from dspark.kernels.sampler import Sampler
from dspark.serve.feed import ContextFeed
from dspark.target.protocol import Target, TargetCache

_log = logging.getLogger("dspark")


class Runner:
    """Target, draft and their caches by request id.

    Logits are returned where they are, with unit column stride: `sampler`, if there is one, decides there;
    else the core reads logits on the CPU in place and copies others to the host. The engine calls the runner
    from one thread under `torch.inference_mode`.
    """

    def __init__(
        self, target: Target, draft: DSparkDraftModel | None, sampler: Sampler | None = None
    ) -> None:
        self.target = target
        self.sampler = sampler
        self.draft_model = draft
        self.can_fork = target.unforkable is None
        self.forks_at_parts = target.forks_at_parts
        # On a GPU, a pass over one short prompt costs as much as over many; on a CPU, cost grows with rows.
        self.packs_prompts = target.device.type == "cuda"
        self.taps: Sequence[int] = draft.config.target_layer_ids if draft is not None else ()
        self.needs_hidden = draft is not None and (
            draft.confidence_head is not None
            or (draft.markov_head is not None and draft.markov_head.needs_hidden)
        )
        self._caches: dict[int, TargetCache] = {}
        self._feed = ContextFeed(draft)
        self._reserved: dict[int, int] = {}
        self._verified: list[tuple[int, int]] = []
        self._verified_taps: Tensor | None = None
        self._drafted: set[int] = set()

    def reserve(self, ids: list[int], positions: list[int]) -> None:
        """Gives the caches of each request, target's and draft's, room for that many positions and no more.

        For a request that is not known yet, the number is stored until `prefill` or `fork` makes it known, so
        that a fork is allocated once, at its full size.
        """
        for request, count in zip(ids, positions, strict=True):
            if (cache := self._caches.get(request)) is None:
                self._reserved[request] = count
                continue
            cache.reserve(count)
            if request in self._feed.contexts:
                self._feed.reserve(request, count)

    def fork(self, new: int, source: int, length: int, drafts: bool) -> int:
        """Makes `new` known with copies of the first positions of `source`'s caches.

        Only committed positions are copied, and `source` stays as it is.

        Args:
            drafts: whether `new` gets a draft context too.

        Returns:
            How many positions were copied, at most `length`. 0 if none can be copied or there is no room for
            the draft's context; then `new` stays unknown.

        Raises:
            ConfigError: `source` is unknown, or `new` is known already.
        """
        if source not in self._caches or new in self._caches:
            fault = f"{source} is unknown" if source not in self._caches else f"{new} is known already"
            raise ConfigError(f"request {new} cannot be made from request {source}: {fault}")
        drafts = drafts and self.draft_model is not None
        if drafts and source not in self._feed.contexts:
            return 0  # its taps were never kept, and a context cannot have holes
        room = self._reserved.get(new, 0)
        cache = self._caches[source].fork(length, room)
        if cache is None:
            return 0
        if drafts:
            try:
                self._feed.fork(new, source, cache.length, room)
            except Exception:  # it concerns the draft alone: the prompt can go through the target instead
                _log.exception("request %d cannot take over the draft's context of request %d", new, source)
                return 0
        self._caches[new] = cache
        self._reserved.pop(new, None)
        return cache.length

    def prefill(self, ids: list[int], parts: list[list[int]], drafts: list[bool]) -> Tensor:
        """Runs the next part of each prompt; returns logits `[requests, vocabulary]` of their last tokens.

        A request becomes known with its first part, or by a fork. Only requests that draft get a draft
        context. If one part fails, nothing is kept of any of them.
        """
        for request, drafting in zip(ids, drafts, strict=True):
            if request not in self._caches:
                self._begin(request, drafting)
        prompts = list(zip(ids, parts, strict=True))
        together = [prompts] if self.packs_prompts else [[prompt] for prompt in prompts]
        passes = [self._prefill(some) for some in together]
        rows = [logits for logits, *_ in passes]
        packed = torch.cat(rows) if len(rows) > 1 else rows[0]
        for request, part in prompts:
            self._caches[request].advance(len(part))
        for _, taps, shares in passes:
            if taps is not None:
                # The first token does not wait for the draft's context.
                self._feed.take(taps, shares)
        self._wait()
        return packed

    def _begin(self, request: int, drafting: bool) -> None:
        cache, positions = self.target.new_cache(), self._reserved.get(request, 0)
        if positions > 0:
            cache.reserve(positions)  # if this fails, the request stays unknown
        self._caches[request] = cache
        self._reserved.pop(request, None)
        if drafting and self.draft_model is not None:
            self._feed.contexts[request] = self.draft_model.new_context()
            if positions > 0:
                self._feed.reserve(request, positions)

    def _prefill(
        self, prompts: Sequence[tuple[int, list[int]]]
    ) -> tuple[Tensor, Tensor | None, list[tuple[int, int, int]]]:
        """One pass over parts of prompts: logits of the last token of each, the taps of all tokens, and which
        requests these belong to, as `ContextFeed.take` expects it."""
        segments: list[tuple[TargetCache, int]] = []
        tokens: list[int] = []
        shares: list[tuple[int, int, int]] = []
        for request, part in prompts:
            cache = self._caches[request]
            # The last part of a prompt begins where the engine wants to fork it.
            cache.mark()
            if request in self._feed.contexts:
                shares.append((request, len(tokens), len(part)))
            segments.append((cache, len(part)))
            tokens += part
        logits, taps = self.target(self._ids(tokens), segments, self.taps if shares else (), logits="last")
        return logits, taps, shares

    def feed(self, ids: list[int]) -> None:
        """Brings the contexts of requests that are about to draft up to date, with the rows that prompts and
        rounds without a draft left waiting."""
        self._feed.complete(ids)
        self._wait()

    def draft(self, ids: list[int], anchors: list[int]) -> tuple[Tensor, Tensor | None]:
        """One block per request: base logits `[requests * gamma, vocabulary]` and, if a head reads them, the
        hidden states `[requests * gamma, hidden]`."""
        if self.draft_model is None:
            raise ConfigError("a draft pass was asked of a runner without a draft")
        contexts = self._feed.complete(ids)
        hidden, base = self.draft_model.block(anchors, contexts)
        self._drafted = set(ids)
        self._wait()
        return base, hidden if self.needs_hidden else None

    def verify(self, ids: list[int], tokens: list[int], lengths: list[int]) -> Tensor:
        """The target over packed rows; returns logits `[rows, vocabulary]`. Caches do not advance."""
        self._verified_taps = None
        segments = [(self._caches[request], n) for request, n in zip(ids, lengths, strict=True)]
        taps = self.taps if any(request in self._feed.contexts for request in ids) else ()
        logits, self._verified_taps = self.target(self._ids(tokens), segments, taps)
        self._verified = list(zip(ids, lengths, strict=True))
        return logits

    def commit(self, ids: list[int], kept: list[int]) -> None:
        """Keeps the first rows of each request's part of the last verify pass.

        The taps of requests that drafted in this round become context at once, as the next round needs them,
        if the draft can take them; those of the others wait (`ContextFeed`).
        """
        keep = dict(zip(ids, kept, strict=True))
        for request, n in keep.items():
            self._caches[request].advance(n)
        for request, _ in self._verified:
            if request not in keep and (cache := self._caches.get(request)) is not None:
                cache.advance(0)  # it has ended and its caches are kept, without rows of its last pass
        # Also for requests that ended between two passes.
        self._feed.let_go(keep)
        taps, self._verified_taps = self._verified_taps, None
        drafted, self._drafted = self._drafted, set()
        if taps is None:
            return
        parts, start = [], 0
        for request, length in self._verified:
            if request in keep and request in self._feed.contexts:
                parts.append((request, start, keep[request]))
            start += length
        self._feed.take(taps, parts, now=drafted)

    def release(self, ids: list[int]) -> None:
        """Forgets requests."""
        for request in ids:
            self._caches.pop(request, None)
            self._reserved.pop(request, None)
            self._feed.release(request)
        if not self._caches:
            self._verified_taps = None

    def _wait(self) -> None:
        """Waits until a GPU has finished. Calls return before that, and the engine, which times them, would
        charge prompts to the round after them and a draft pass to its chain. Verify passes need no wait: the
        decisions that follow wait for them."""
        if self.target.device.type == "cuda":
            torch.cuda.current_stream(self.target.device).synchronize()

    def _ids(self, tokens: list[int]) -> Tensor:
        return torch.tensor(tokens, dtype=torch.int64, device=self.target.device)
