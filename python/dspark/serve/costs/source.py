"""Where a decoder's cost table comes from: given, kept on disk, or measured now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dspark import _core
from dspark.serve.costs.cache import cost_file, cost_key, load, store
from dspark.serve.costs.measure import AT_START, Effort, measure
from dspark.serve.costs.record import Costs

if TYPE_CHECKING:
    from pathlib import Path

    from dspark.serve.models import Models
    from dspark.serve.options import Options


@dataclass(frozen=True, slots=True)
class CostSource:
    """A table, and what `info()` says of it."""

    table: _core.CostTable
    source: str


def obtain(models: Models, options: Options) -> CostSource | None:
    """The table for these options; `None` where nothing is planned by costs. For the engine's own thread."""
    if options.policy != "throughput" or models.draft is None:
        return None
    if options.cost_table is not None:
        return CostSource(options.cost_table, "given")
    block_size = models.drafted_per_round(options.block_size)
    key = cost_key(models, block_size, options.markov_candidates)
    kept = load(key, options.max_batch_size * (1 + block_size))
    if kept is not None:
        return CostSource(kept.table(), f"from cache {cost_file(key)}")
    costs, _ = remeasure(models, options, AT_START)
    return CostSource(costs.table(), f"measured at start in {costs.seconds:.2g} s")


def remeasure(models: Models, options: Options, effort: Effort) -> tuple[Costs, Path | None]:
    """Measures whatever is kept, and keeps the outcome: the costs and their file, if it could be written."""
    block_size = models.drafted_per_round(options.block_size)
    costs = measure(
        models,
        block_size=block_size,
        max_batch_size=options.max_batch_size,
        candidates=options.markov_candidates,
        effort=effort,
    )
    return costs, store(cost_key(models, block_size, options.markov_candidates), costs)
