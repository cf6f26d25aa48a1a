"""The processes of a run: one alone, or many under torchrun."""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

GRACE = 0.2
"""Seconds in which threads that wait for Python's lock get it."""

PATIENCE = timedelta(days=7)
"""How long a process waits for the others: shares of answers and of hidden states take hours, some longer
than others, and torch's own limit is minutes. torchrun ends those that wait for one that died."""


@dataclass(frozen=True, slots=True)
class World:
    """This process's place among `size`."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and talks."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.size > 1:
            values = values.clone()
            dist.all_reduce(values)
        return values

    def any(self, flag: bool) -> bool:
        """Whether any process says so."""
        return bool(self.sum(torch.tensor(float(flag), device=self.device)) > 0)

    def agrees(self, value: str) -> bool:
        """Whether all processes gave the same value; every one must ask."""
        number = int.from_bytes(hashlib.blake2b(value.encode(), digest_size=7).digest(), "big")
        bounds = torch.tensor([number, -number], device=self.device)
        if self.size > 1:
            dist.all_reduce(bounds, dist.ReduceOp.MAX)
        return bool(bounds[0] == -bounds[1])

    def wait(self) -> None:
        """Until all processes are here."""
        if self.size > 1:
            dist.barrier()

    def close(self) -> None:
        """Ends the group, if there is one."""
        if self.size > 1 and dist.is_initialized():
            # A thread of gloo's lets go of the last tensor behind the operation, and needs Python's lock for
            # it: an interpreter that ends meanwhile kills that thread, and C++ the process.
            time.sleep(GRACE)
            dist.destroy_process_group()


def is_main_process() -> bool:
    """Whether this is the main process of those that torchrun started, or alone; before `join`, too."""
    return int(os.environ.get("RANK", "0")) == 0


def join(device: torch.device) -> World:
    """This process alone, or its place in what torchrun started (NCCL on GPUs, gloo on CPUs)."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return World(0, 1, device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
    return World(dist.get_rank(), size, device)


def distribute(
    module: nn.Module, inner: nn.Module, layers: list[nn.Module], world: World, how: str
) -> nn.Module:
    """The module for this world: itself alone, under DistributedDataParallel ("ddp"), or sharded in place
    ("fsdp", torch's FSDP2): each of `layers` by itself, and what else `inner` has, which holds all parameters
    and may be called without `module`."""
    if world.size == 1:
        return module
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(module)
    from torch.distributed.fsdp import fully_shard

    for layer in layers:
        fully_shard(layer)
    fully_shard(inner)
    return module


def whole(value: Any) -> Any:
    """A tensor out of its shards; every process must ask. Other values as they are, containers inside."""
    if hasattr(value, "full_tensor"):
        return value.full_tensor()
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [whole(item) for item in value]
    return value


def like(value: Any, sample: Any) -> Any:
    """A whole tensor, sharded as `sample` is."""
    if hasattr(sample, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(value.to(sample.device), sample.device_mesh, sample.placements)
    return value
