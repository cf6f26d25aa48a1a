"""Where a decoder's cost table comes from: given, kept on disk, or measured now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dspark import _core
from dspark.serve.costs.cache import Key, cost_file, cost_key, load, store
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
    found, path = kept(models, options)
    if found is not None:
        return CostSource(found.table(), f"from cache {path}")
    costs, _ = remeasure(models, options, AT_START)
    return CostSource(costs.table(), f"measured at start in {costs.seconds:.2g} s")


def kept(models: Models, options: Options) -> tuple[Costs | None, Path]:
    """The costs that are kept for these options, if any, and the file of them."""
    key = _key(models, options)
    widest = options.max_batch_size * (1 + models.drafted_per_round(options.block_size))
    return load(key, widest), cost_file(key)


def remeasure(models: Models, options: Options, effort: Effort) -> tuple[Costs, Path | None]:
    """Measures whatever is kept, and keeps the outcome: the costs and their file, if it could be written."""
    costs = measure(
        models,
        block_size=models.drafted_per_round(options.block_size),
        max_batch_size=options.max_batch_size,
        candidates=options.markov_candidates,
        effort=effort,
    )
    return costs, store(_key(models, options), costs)


def _key(models: Models, options: Options) -> Key:
    return cost_key(models, models.drafted_per_round(options.block_size), options.markov_candidates)
