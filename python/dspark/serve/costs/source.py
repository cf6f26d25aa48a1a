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
    """The table for these options; `None` if nothing is planned by costs. Call it on the engine's thread."""
    if options.policy != "throughput" or models.draft is None:
        return None
    if options.cost_table is not None:
        return CostSource(options.cost_table, "given")
    key = _key(models, options)
    found = load(key)
    if found is not None and found.widest >= _widest(models, options):
        return CostSource(found.table(), f"from cache {cost_file(key)}")
    costs = _measured(models, options, AT_START)
    source = f"measured at start in {costs.seconds:.2g} s"
    if found is None or found.repeats <= costs.repeats:
        store(key, costs)
    else:  # wider, but hurried: it does not replace a careful measurement
        source += f": {cost_file(key)} is for fewer requests at once; dspark profile can replace it"
    return CostSource(costs.table(), source)


def kept(models: Models, options: Options) -> tuple[Costs | None, Path]:
    """The stored costs, if there are any and they are wide enough for these options, and their file."""
    key = _key(models, options)
    found = load(key)
    is_enough = found is not None and found.widest >= _widest(models, options)
    return found if is_enough else None, cost_file(key)


def remeasure(models: Models, options: Options, effort: Effort) -> tuple[Costs, Path | None]:
    """Measures even if costs are stored, and stores the new ones: these and their file, if it was written."""
    costs = _measured(models, options, effort)
    return costs, store(_key(models, options), costs)


def _measured(models: Models, options: Options, effort: Effort) -> Costs:
    return measure(
        models,
        block_size=models.drafted_per_round(options.block_size),
        max_batch_size=options.max_batch_size,
        candidates=options.markov_candidates,
        effort=effort,
    )


def _widest(models: Models, options: Options) -> int:
    """Tokens of the widest pass that these options allow."""
    return options.max_batch_size * (1 + models.drafted_per_round(options.block_size))


def _key(models: Models, options: Options) -> Key:
    return cost_key(models, models.drafted_per_round(options.block_size), options.markov_candidates)
