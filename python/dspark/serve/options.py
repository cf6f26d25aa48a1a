"""The options of a decoder, checked against its models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from os import PathLike
from typing import TYPE_CHECKING, Any

from dspark import _core
from dspark.checkpoint.calibration import RULES
from dspark.errors import ConfigError, shown
from dspark.memory import available_bytes

if TYPE_CHECKING:
    from dspark.serve.models import Models

POLICIES = ("fixed", "threshold", "throughput")
_WHOLE = (
    "block_size",
    "markov_candidates",
    "max_batch_size",
    "max_model_len",
    "max_kv_tokens",
    "prefill_chunk_size",
    "max_queue_size",
    "budget_lag",
)

MOST_LAG = 1000
"""The largest `budget_lag`, in rounds: all rounds of the lag are remembered."""

PAGE = 16
"""Positions in a page of the caches."""

DEFAULT_KV_TOKENS = 1 << 17
"""Default for cache positions over all requests if memory allows: more than a CPU can serve at once."""

SHARE = {"cpu": 0.25, "cuda": 0.5}
"""Default share for the caches of the memory that is free once the models are loaded: prefixes of finished
requests are kept until others need the room, so all of it fills up over time."""

STATES = 4
"""Copies of a target's recurrent states for each request that may run at once: its own and its mark's, and
both again for one kept prefix (the core keeps no more prefixes than requests may run)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of `DSparkDecoder.from_pretrained` other than the models."""

    policy: str = "throughput"
    confidence_threshold: float | None = None
    cost_table: _core.CostTable | None = None
    budget_lag: int | None = None
    calibration: _core.Calibration | str | PathLike[str] | None = None
    block_size: int | None = None
    markov_candidates: int | None = None
    acceptance: str = "rejection"
    max_batch_size: int = 32
    max_model_len: int | None = None
    max_kv_tokens: int | None = None
    prefill_chunk_size: int = 512
    max_queue_size: int = 1024

    def __post_init__(self) -> None:
        """Raises `ConfigError` for options that are wrong whatever the models are."""
        for name in _WHOLE:
            value = getattr(self, name)
            if value is None:
                continue
            is_whole = isinstance(value, Integral) and not isinstance(value, bool)
            if not is_whole or not 1 <= value < 2**31:
                raise ConfigError(f"{name} must be a whole number from 1 to 2^31 - 1, not {shown(value)}")
            object.__setattr__(self, name, int(value))  # JSON cannot encode numpy integers
        if (self.budget_lag or 0) > MOST_LAG:
            raise ConfigError(f"budget_lag is {self.budget_lag} rounds; expected at most {MOST_LAG}")
        if self.acceptance not in RULES:
            raise ConfigError(f"acceptance must be one of {', '.join(RULES)}, not {shown(self.acceptance)}")
        if self.policy not in POLICIES:
            raise ConfigError(f"policy must be one of {', '.join(POLICIES)}, not {shown(self.policy)}")
        threshold = self.confidence_threshold
        if self.policy == "threshold":
            if (
                isinstance(threshold, bool)
                or not isinstance(threshold, int | float)
                or not 0 <= threshold <= 1
            ):
                raise ConfigError(
                    f'policy "threshold" needs a confidence_threshold between 0 and 1, not {shown(threshold)}'
                )
        elif threshold is not None:
            raise ConfigError(
                f'confidence_threshold is for policy "threshold", but the policy is "{self.policy}"'
            )
        for name in ("cost_table", "budget_lag"):
            if getattr(self, name) is not None and self.policy != "throughput":
                raise ConfigError(f'{name} is for policy "throughput", but the policy is "{self.policy}"')

    def window(self, models: Models) -> int:
        """The most positions of one request."""
        return models.window if self.max_model_len is None else self.max_model_len

    def kv_tokens(self, models: Models) -> int:
        """The most positions of all running requests and kept prefixes.

        By default `DEFAULT_KV_TOKENS`, or two windows if that is more, but not more than fits into a share of
        the memory that is free once room for recurrent states is subtracted; one request of the whole window
        always fits.
        """
        if self.max_kv_tokens is not None:
            return self.max_kv_tokens
        window, device = self.window(models), models.target.device
        most = max(DEFAULT_KV_TOKENS, 2 * window)
        each, free = models.position_bytes, available_bytes(device)
        if not each or free is None:
            return most
        free -= STATES * self.max_batch_size * models.state_bytes
        return max(min(most, int(SHARE[device.type] * free) // each), window + PAGE)

    def engine(
        self,
        models: Models,
        costs: _core.CostTable | None,
        calibrations: Sequence[tuple[tuple[float, int, float, float] | None, _core.Calibration]] = (),
    ) -> _core.Engine:
        """The Rust engine; raises `ConfigError` for options that do not fit the models.

        `costs` is what the throughput policy plans by (`dspark.serve.costs.obtain`); without a draft there is
        nothing to plan. `calibrations` are by sampling regime (`dspark.serve.calibration.in_force`).
        """
        if self.max_model_len is not None and self.max_model_len > models.window:
            raise ConfigError(
                f"max_model_len = {self.max_model_len} is more than the models' window of {models.window}"
            )
        if self.policy == "threshold" and models.draft is not None and not models.has_confidence:
            raise ConfigError(
                'policy "threshold" needs a draft with a confidence head, but this one has none'
            )
        return _core.Engine(
            models.runner(),
            models.heads(),
            rule=self.acceptance,
            policy=self.policy if models.draft is not None else "fixed",
            gamma=models.gamma,
            block_size=models.drafted_per_round(self.block_size),
            max_batch_size=self.max_batch_size,
            max_kv_tokens=self.kv_tokens(models),
            prefill_chunk_size=self.prefill_chunk_size,
            max_queue_size=self.max_queue_size,
            confidence_threshold=self.confidence_threshold,
            cost_table=costs if models.draft is not None else None,
            markov_candidates=self.markov_candidates,
            calibrations=calibrations,
            budget_lag=self.budget_lag if models.draft is not None else None,
        )

    def info(self, models: Models) -> dict[str, Any]:
        """The options in force."""
        return {
            "acceptance": self.acceptance,
            "policy": self.policy if models.draft is not None else "none: no draft",
            "confidence_threshold": self.confidence_threshold,
            "budget_lag": self.budget_lag,
            "block_size": models.drafted_per_round(self.block_size),
            "markov_candidates": self.markov_candidates,
            "max_batch_size": self.max_batch_size,
            "max_model_len": self.window(models),
            "max_kv_tokens": self.kv_tokens(models),
            "kv_bytes_per_token": models.position_bytes or None,
            "state_bytes_per_request": STATES * models.state_bytes,
            "prefill_chunk_size": self.prefill_chunk_size,
            "max_queue_size": self.max_queue_size,
        }
