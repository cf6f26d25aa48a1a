"""What a pair's passes cost on this machine: timed on the real models, kept on disk, used by the planner."""

from dspark.serve.costs.device import device_name
from dspark.serve.costs.measure import AT_START, THOROUGH, Effort, measure
from dspark.serve.costs.record import Costs
from dspark.serve.costs.source import CostSource, kept, obtain, remeasure

__all__ = [
    "AT_START",
    "THOROUGH",
    "CostSource",
    "Costs",
    "Effort",
    "device_name",
    "kept",
    "measure",
    "obtain",
    "remeasure",
]
