"""Chains and acceptance where the rows are: the core plans, torch allocates memory, the kernels decide."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dspark import _core
from dspark.kernels.choice import Choice, prepare, stream

ROLE = "sampling"
MOST_RANK = 1024
"""The longest latent vector of a Markov head that a block of threads holds (chain.cuh)."""
MOST_COLUMNS, MOST_BLOCK = 2**20 - 1, 64
"""The most logits in a row, and rows of a request (rust/src/cuda/sampling)."""


class Sampler:
    """Runs the core's plans on one device, on torch's current stream.

    Attributes:
        heads: the draft's heads on the device, as `dspark.serve.heads.heads_to_device` gives them.
        device: where the kernels run and everything that they read is.
    """

    def __init__(self, kernels: _core.Kernels, device: torch.device, heads: dict[str, Any]) -> None:
        self.heads = heads
        self._kernels = kernels
        self.device = torch.empty(0, device=device).device  # with its number

    def run(
        self, plan: _core.VerifyPlan | _core.ChainPlan
    ) -> tuple[bytes, int, int, tuple[Tensor, Tensor, Tensor]]:
        """Runs a plan and waits for its outcome.

        Returns:
            The outcome's bytes, the addresses of the plan's table and scratch memory, and the tensors that
            keep these alive while distributions in them are read.
        """
        table = torch.frombuffer(bytearray(plan.table), dtype=torch.uint8).to(self.device)
        scratch = torch.empty(plan.scratch, dtype=torch.uint8, device=self.device)
        start, size = plan.result
        # The outcome is copied whole, but its padding is never written, nor confidences without a head.
        scratch[start : start + size].zero_()
        plan.run(self._kernels, table.data_ptr(), scratch.data_ptr(), stream(self.device))
        outcome = scratch[start : start + size].cpu()
        return outcome.numpy().tobytes(), table.data_ptr(), scratch.data_ptr(), (table, scratch, outcome)


def sampling_role(choice: Choice, dtypes: set[torch.dtype], *, rank: int, vocabulary: int, gamma: int) -> str:
    """What draws and judges for models of these dtypes, a Markov head of `rank` (0: none), logits of
    `vocabulary` columns and `gamma` drafted tokens: "kernel ..." or "core: ..." with the reason."""
    if choice.kernels is None:
        return f"core: {choice.reason}"
    if torch.float64 in dtypes:
        return "core: the kernels read float32, float16 and bfloat16, not float64"
    if rank > MOST_RANK:
        return f"core: the Markov head has rank {rank}, the kernels take at most {MOST_RANK}"
    if vocabulary > MOST_COLUMNS:
        return f"core: rows have {vocabulary} logits, the kernels take at most {MOST_COLUMNS}"
    if gamma >= MOST_BLOCK:
        return f"core: blocks have {1 + gamma} rows, the kernels take at most {MOST_BLOCK}"
    entries = [
        entry for unit, names in _core.kernel_units() if unit in ("sampling", "chain") for entry in names
    ]
    if (reason := prepare(choice.kernels, ROLE, entries)) is not None:
        return f"core: {reason}"
    return 'kernel; core for the rule "block", log-probabilities and markov_candidates'
