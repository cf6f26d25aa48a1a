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
"""Seconds for threads that wait for Python's lock to get it."""

PATIENCE = timedelta(days=7)
"""How long a process waits for the others: a process's share of answers or hidden states takes hours, some
shares longer than others, and torch's own limit is minutes. If a process dies, torchrun ends those that wait
for it."""


@dataclass(frozen=True, slots=True)
class World:
    """This process's place among `size`."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and messages."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.size > 1:
            values = values.clone()
            dist.all_reduce(values)
        return values

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        return bool(self.sum(torch.tensor(float(flag), device=self.device)) > 0)

    def agrees(self, value: str) -> bool:
        """Whether all processes gave the same value; every one must call this."""
        number = int.from_bytes(hashlib.blake2b(value.encode(), digest_size=7).digest(), "big")
        bounds = torch.tensor([number, -number], device=self.device)
        if self.size > 1:
            dist.all_reduce(bounds, dist.ReduceOp.MAX)
        return bool(bounds[0] == -bounds[1])

    def wait(self) -> None:
        """Waits until all processes are here."""
        if self.size > 1:
            dist.barrier()

    def close(self) -> None:
        """Ends the group, if there is one."""
        if self.size > 1 and dist.is_initialized():
            # One of gloo's threads releases the last tensor after the operation, and needs Python's lock for
            # that: an interpreter that ends meanwhile kills the thread, and C++ then kills the process.
            time.sleep(GRACE)
            dist.destroy_process_group()


def is_main_process() -> bool:
    """Whether this process is alone or the main one of those that torchrun started; also before `join`."""
    return int(os.environ.get("RANK", "0")) == 0


def join(device: torch.device) -> World:
    """This process alone, or joined to the others that torchrun started (NCCL on GPUs, gloo on CPUs)."""
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
    """The module for this world: as it is for one process, under DistributedDataParallel ("ddp"), or sharded
    in place ("fsdp", torch's FSDP2): each of `layers` by itself, then the rest of `inner`, which holds all
    parameters and may be called without `module`."""
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
    """A tensor gathered from its shards, also inside dicts and lists; other values are returned as they are.
    Every process must call this."""
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
