"""Forks that are wrong, to see that the tests notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.attention import KVStore
from dspark.target.adapter import states
from dspark.target.hybrid.cache import HybridCache


def one_row_less(patch: pytest.MonkeyPatch) -> None:
    copied = KVStore._copied

    def short(self: KVStore, rows: int, room: int) -> KVStore:
        store = copied(self, rows, room)
        store.data[:, :, rows - 1] = 0
        return store

    patch.setattr(KVStore, "_copied", short)
    whole = states.copied

    def cut(source: Any, length: int) -> Any:
        own, last = whole(source, length), length - 1
        states._replace(own, lambda x: torch.cat((x[..., :last, :], 0 * x[..., last:, :]), dim=-2))
        return own

    patch.setattr(states, "copied", cut)


def shared_memory(patch: pytest.MonkeyPatch) -> None:
    copied = KVStore._copied

    def shared(self: KVStore, rows: int, room: int) -> KVStore:
        store = copied(self, rows, self.capacity)
        store.data = self.data
        return store

    patch.setattr(KVStore, "_copied", shared)


def no_conv(patch: pytest.MonkeyPatch) -> None:
    forget(patch, lambda cache: cache.conv.zero_())


def no_state(patch: pytest.MonkeyPatch) -> None:
    forget(patch, lambda cache: cache.state.zero_())


def forget(patch: pytest.MonkeyPatch, change: Callable[[HybridCache], Tensor]) -> None:
    whole = HybridCache.fork

    def partial(self: HybridCache, length: int, room: int = 0) -> HybridCache | None:
        if (cache := whole(self, length, room)) is not None:
            change(cache)
        return cache

    patch.setattr(HybridCache, "fork", partial)


def present_state(patch: pytest.MonkeyPatch) -> None:
    """The states of the end beside keys and values of the mark."""
    whole = HybridCache.fork

    def late(self: HybridCache, length: int, room: int = 0) -> HybridCache | None:
        if (cache := whole(self, length, room)) is not None:
            cache.conv, cache.state = self.conv.clone(), self.state.clone()
        return cache

    patch.setattr(HybridCache, "fork", late)


def shared_state(patch: pytest.MonkeyPatch) -> None:
    whole = HybridCache.fork

    def shared(self: HybridCache, length: int, room: int = 0) -> HybridCache | None:
        if (cache := whole(self, length, room)) is not None and cache.length == self.length:
            cache.conv, cache.state = self.conv, self.state
        return cache

    patch.setattr(HybridCache, "fork", shared)
