"""What is measured: modes, cells, and how long it will take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from dspark import _core
from dspark.errors import ConfigError
from dspark.serve.options import POLICIES

PLAIN = "plain"

KEPT_PER_ROUND = 1.5
"""Tokens per round that the first estimate assumes; later ones use what was measured."""

WIDE = 128
"""Tokens of the pass that stands for prefills in the estimate."""

SETTLE = 0.03
"""Seconds to wait around each timed run: OpenMP's workers spin for 10 ms or so after their last product, on a
core that the next mode needs, and by then the engine's statistics are complete."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One condition under which all modes are compared."""

    prompts: str
    """The name of the prompt set."""
    temperature: float
    batch: int
    """Requests at once, all of the same number of tokens; when one ends, the next begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """All cells, and how each is measured; raises `ConfigError` for what cannot be measured."""

    sets: Sequence[str]
    temperatures: Sequence[float] = (0.0, 0.7)
    batches: Sequence[int] = (1, 2, 4, 8, 16, 32)
    policies: Sequence[str] = POLICIES
    turns: int = 9
    tokens: int = 64
    """Per request."""
    threshold: float = 0.5
    """Of the policy "threshold"."""

    def __post_init__(self) -> None:
        for name in ("sets", "temperatures", "batches", "policies"):
            if not getattr(self, name):
                raise ConfigError(f"{name} of a benchmark must have at least one entry")
        for name, values in (("batches", self.batches), ("turns", [self.turns]), ("tokens", [self.tokens])):
            for value in values:
                if value < 1:
                    raise ConfigError(f"{name} of a benchmark must be at least 1, not {value}")
        for policy in self.policies:
            if policy not in POLICIES:
                raise ConfigError(f"policy must be one of {', '.join(POLICIES)}, not {policy!r}")
        if "threshold" in self.policies and not 0 <= self.threshold <= 1:
            raise ConfigError(f"the confidence threshold must be between 0 and 1, not {self.threshold}")
        if self.tokens < 2:
            raise ConfigError(
                f"a benchmark needs at least 2 tokens per request, not {self.tokens}: the first comes from "
                "the prompt's own pass"
            )

    @property
    def modes(self) -> tuple[str, ...]:
        """Plain decoding and the policies, each once."""
        return (PLAIN, *(policy for policy in POLICIES if policy in self.policies))

    @property
    def warm_tokens(self) -> int:
        """Tokens per request that are generated before each timed run, so that "throughput" can adapt."""
        return max(2, self.tokens // 8)

    def cells(self) -> Iterator[Cell]:
        """Every cell, batches innermost."""
        for name, temperature, batch in product(self.sets, self.temperatures, self.batches):
            yield Cell(name, temperature, batch)


def predicted_seconds(
    grid: Grid, cell: Cell, costs: _core.CostTable, block_size: int, prompt: float = 0.0
) -> float:
    """Seconds that a cell takes, going by the cost table: one whole turn to warm up, and the timed ones.

    `prompt` is the mean length of the set's prompts in tokens. Each request is assumed to be followed by
    another.
    """
    passes = 1 + grid.turns * (1 + grid.warm_tokens / grid.tokens)
    prefills = 2 * (1 + 2 * grid.turns) * cell.batch * prompt * costs.seconds(WIDE) / WIDE
    waits = 2 * SETTLE * grid.turns
    plain = grid.tokens * costs.seconds(cell.batch)
    drafting = grid.tokens / KEPT_PER_ROUND * costs.seconds(cell.batch * (1 + block_size))
    each = {PLAIN: plain, "fixed": drafting, "threshold": (plain + drafting) / 2, "throughput": plain}
    return sum(passes * each[mode] + prefills + waits for mode in grid.modes)
