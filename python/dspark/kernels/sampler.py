"""Chains and acceptance where the rows lie: the core plans, torch gives the memory, the kernels decide."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dspark import _core
from dspark.kernels.choice import Choice, prepare, stream

ROLE = "sampling"
MOST_RANK = 1024
"""The longest latent vector of a Markov head that a block of threads holds (chain.cuh)."""


class Sampler:
    """Runs the core's plans on one device, on torch's current stream.

    Attributes:
        heads: the draft's heads on the device, as `dspark.serve.heads.heads_to_device` gives them.
    """

    def __init__(self, kernels: _core.Kernels, device: torch.device, heads: dict[str, Any]) -> None:
        self.heads = heads
        self._kernels = kernels
        self._device = device

    def run(
        self, plan: _core.VerifyPlan | _core.ChainPlan
    ) -> tuple[bytes, int, int, tuple[Tensor, Tensor, Tensor]]:
        """Runs a plan and waits for its outcome.

        Returns:
            The outcome's bytes, the addresses of the plan's table and scratch memory, and what keeps these
            (and the heads) alive as long as laws in them are read.
        """
        table = torch.frombuffer(bytearray(plan.table), dtype=torch.uint8).to(self._device)
        scratch = torch.empty(plan.scratch, dtype=torch.uint8, device=self._device)
        plan.run(self._kernels, table.data_ptr(), scratch.data_ptr(), stream(self._device))
        start, size = plan.result
        outcome = scratch[start : start + size].cpu()
        return outcome.numpy().tobytes(), table.data_ptr(), scratch.data_ptr(), (table, scratch, outcome)


def sampling_role(choice: Choice, dtypes: set[torch.dtype], rank: int) -> str:
    """Who draws and judges for models of these element types and a Markov head of this rank (0: none):
    "kernel ..." or "core: ..." with the reason."""
    if choice.kernels is None:
        return f"core: {choice.reason}"
    if torch.float64 in dtypes:
        return "core: the kernels read float32, float16 and bfloat16, not float64"
    if rank > MOST_RANK:
        return f"core: a Markov head of rank {rank}, and the kernels hold {MOST_RANK}"
    entries = [
        entry for unit, names in _core.kernel_units() if unit in ("sampling", "chain") for entry in names
    ]
    if (reason := prepare(choice.kernels, ROLE, entries)) is not None:
        return f"core: {reason}"
    return 'kernel; core for the rule "block", log-probabilities and markov_candidates'
