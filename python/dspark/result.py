"""What comes back from a request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dspark.errors import DSparkError

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Round:
    """One round of one request: draft, plan, verify, accept, commit."""

    drafted: int
    """Tokens drafted."""
    verified: int
    """Drafted tokens that the target checked."""
    accepted: int
    """Drafted tokens kept."""
    confidence: tuple[float, ...]
    """One probability per drafted token; empty without a confidence head."""
    committed: int
    """Tokens committed: accepted + 1, or only what was kept in the round that ended the request."""

    def to_json(self) -> dict[str, Any]:
        """The fields of the command line's `rounds`."""
        return {
            "drafted": self.drafted,
            "verified": self.verified,
            "accepted": self.accepted,
            "confidence": [round(c, 6) for c in self.confidence],
        }


@dataclass(frozen=True, slots=True)
class Timing:
    """Where the time went, in seconds from the call on. A pass shared by a batch counts whole for each of its
    requests."""

    queue_s: float
    prefill_s: float
    draft_s: float
    verify_s: float
    sample_s: float
    total_s: float
    time_to_first_token_s: float | None
    """From the call to the first token; `None` if there was none."""
    gaps_s: tuple[float, ...] = field(repr=False)
    """Time between tokens: a round's gap divided by its tokens, once for each of them."""

    def inter_token_s(self, percentile: float) -> float | None:
        """The given percentile (0 to 100) of the time between tokens, by nearest rank: the shortest gap
        that so many are not longer than. `None` without one."""
        if not self.gaps_s:
            return None
        rank = math.ceil(percentile * len(self.gaps_s) / 100)
        return sorted(self.gaps_s)[max(rank, 1) - 1]

    def to_json(self) -> dict[str, float | None]:
        """Plain numbers."""
        return {
            "queue_s": self.queue_s,
            "prefill_s": self.prefill_s,
            "draft_s": self.draft_s,
            "verify_s": self.verify_s,
            "sample_s": self.sample_s,
            "total_s": self.total_s,
            "time_to_first_token_s": self.time_to_first_token_s,
            "inter_token_p50_s": self.inter_token_s(50),
            "inter_token_p90_s": self.inter_token_s(90),
            "inter_token_p99_s": self.inter_token_s(99),
        }


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """The outcome of one request."""

    text: str
    """The generated text, empty if the target has no tokenizer. It is decoded from the generated ids alone:
    with tokenizers that mark where words begin (Metaspace, Strip) a leading space is missing."""
    token_ids: tuple[int, ...]
    """The generated tokens, a stopping token included."""
    prompt_token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None
    """The stop id or string that was met; `None` for the model's end token."""
    seed: int
    """What the request's noise came from, together with `sample`."""
    rounds: tuple[Round, ...] = field(repr=False)
    timing: Timing = field(repr=False)
    logprobs: tuple[dict[int, float], ...] | None = field(default=None, repr=False)
    """For each token: its log probability and those of the most likely alternatives, by token id, under the
    distribution that it was drawn from (`SamplingParams.logprobs`)."""
    error: DSparkError | None = None
    """What failed, if the finish reason is "error"."""
    bad_draft_rows: int = 0
    """Draft rows from which no token could be drawn; each ended its block early."""
    sample: int = 0
    """Which of the prompt's `n` samples it is."""
    speculation: str = "on"
    """Starts with "on", followed by how many rounds went without a draft and why (the policy's reasons, or
    that the draft failed), or with "off" and why nothing was drafted."""
    reused_tokens: int = 0
    """Prompt tokens whose cache rows were copied from another request's instead of computed."""
    preemptions: int = 0
    """How often its caches were given up to other requests and computed again; costs time, not tokens."""

    @property
    def acceptance_length(self) -> float | None:
        """Mean of the tokens committed per round; `None` without a draft or without a round."""
        if not self.rounds or self.speculation.startswith("off"):
            return None
        return sum(r.committed for r in self.rounds) / len(self.rounds)

    def to_json(self) -> dict[str, Any]:
        """The object that `dspark generate --json` prints."""
        shown: dict[str, Any] = {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "prompt_token_ids": list(self.prompt_token_ids),
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "seed": self.seed,
            "acceptance_length": self.acceptance_length,
            "rounds": [r.to_json() for r in self.rounds],
            "timing": self.timing.to_json(),
            "speculation": self.speculation,
            "bad_draft_rows": self.bad_draft_rows,
            "reused_tokens": self.reused_tokens,
            "preemptions": self.preemptions,
        }
        if self.logprobs is not None:
            shown["logprobs"] = [{str(token): value for token, value in row.items()} for row in self.logprobs]
        if self.error is not None:
            shown["error"] = self.error.to_json()
        return shown


@dataclass(frozen=True, slots=True)
class StreamPiece:
    """What one round added to a stream. Count tokens by `token_ids`: a piece can hold several, or none."""

    text: str
    token_ids: tuple[int, ...]
    result: GenerationResult | None = None
    """The whole, in the last piece."""


def pooled_acceptance_length(results: Sequence[GenerationResult]) -> float | None:
    """All tokens committed in rounds over all rounds, of the requests that have an `acceptance_length`."""
    rounds = [r for result in results if result.acceptance_length is not None for r in result.rounds]
    return sum(r.committed for r in rounds) / len(rounds) if rounds else None
