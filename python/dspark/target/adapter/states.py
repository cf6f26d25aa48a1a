"""The length of a key/value cache of transformers, read and set without its `crop`.

`crop` took an absolute length in 4.5x and takes a negative count of tokens in 5.x, and the tensors moved from
two lists on the cache to one object for each layer. So the tensors themselves are looked at and cut, and what
cannot be cut is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from typing import Any, TypeGuard

import torch
from torch import Tensor

KEYS_AND_VALUES = ("keys", "values")


def truncate(states: Any, length: int) -> None:
    """Keeps the first `length` positions of every layer."""
    _replace(states, lambda tensor: tensor[..., :length, :])
    if hasattr(states, "_seen_tokens"):  # counted apart from the tensors up to 4.53
        states._seen_tokens = length


def copied(states: Any, length: int) -> Any:
    """A cache that holds copies of the first `length` positions and shares no tensor with `states`."""
    own = copy(states)
    if getattr(states, "layers", None) is not None:
        own.layers = [copy(layer) for layer in states.layers]
    else:
        own.key_cache, own.value_cache = list(states.key_cache), list(states.value_cache)
    truncate(own, length)
    _replace(own, lambda tensor: tensor.clone(memory_format=torch.contiguous_format))
    return own


def _replace(states: Any, change: Callable[[Tensor], Tensor]) -> None:
    """Puts `change(tensor)` in the place of the keys and the values of every layer."""
    layers = getattr(states, "layers", None)
    if layers is not None:
        for layer in layers:
            for name in KEYS_AND_VALUES:
                if _is_filled(tensor := getattr(layer, name, None)):
                    setattr(layer, name, change(tensor))
        return
    columns: tuple[list[Any], list[Any]] = (states.key_cache, states.value_cache)
    for column in columns:
        for index, tensor in enumerate(column):
            if _is_filled(tensor):
                column[index] = change(tensor)


def fault(states: Any, length: int) -> str | None:
    """Why `states` is not a cache that holds exactly the first `length` positions, or None if it is."""
    pairs = list(_pairs(states))
    if length and not pairs:
        return "keeps nothing in the key/value cache, so its state is somewhere else"
    for index, (keys, values) in pairs:
        for tensor in (keys, values):
            if tensor.shape[-2] != length:
                return f"keeps {tensor.shape[-2]} positions of {length} in layer {index}"
    if (counted := states.get_seq_length()) != length:
        return f"counts {counted} positions where {length} are kept"
    return None


def foreign_state(states: Any) -> str | None:
    """What a cache holds beside keys and values of every position, or None: it could not be cut by length."""
    for index, layer in enumerate(getattr(states, "layers", ())):
        if getattr(layer, "is_sliding", False):
            return f"keeps only a window of positions in layer {index}"
        for name, value in vars(layer).items():
            if name not in KEYS_AND_VALUES and _holds_tensors(value):
                return f"keeps {name} beside keys and values in layer {index}"
    return None


def _pairs(states: Any) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    """Keys and values of the layers that have any: some layers share those of others, or have none."""
    layers = getattr(states, "layers", None)
    if layers is not None:
        found = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in layers]
    else:
        found = list(zip(states.key_cache, states.value_cache, strict=True))
    for index, (keys, values) in enumerate(found):
        if isinstance(keys, Tensor) and isinstance(values, Tensor) and keys.dim() > 1:
            yield index, (keys, values)


def _is_filled(tensor: Any) -> TypeGuard[Tensor]:
    return isinstance(tensor, Tensor) and tensor.numel() > 0


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Tensor):
        return True
    if isinstance(value, dict):
        return any(_holds_tensors(entry) for entry in value.values())
    return isinstance(value, list | tuple) and any(_holds_tensors(entry) for entry in value)
