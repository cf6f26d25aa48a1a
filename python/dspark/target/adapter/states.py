"""The length of a key/value cache of transformers, read and set without its `crop`.

`crop` took an absolute length in 4.5x and takes a negative count of tokens in 5.x. So these functions inspect
and cut the tensors themselves, and name what cannot be cut.
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


def copied(states: Any, length: int) -> Any:
    """A cache that holds copies of the first `length` positions and shares no tensor with `states`."""
    own = copy(states)
    own.layers = [copy(layer) for layer in states.layers]
    truncate(own, length)
    _replace(own, lambda tensor: tensor.clone(memory_format=torch.contiguous_format))
    return own


def held_bytes(states: Any) -> int:
    """Bytes of all keys and values."""
    return sum(tensor.nbytes for _, pair in _pairs(states) for tensor in pair)


def _replace(states: Any, change: Callable[[Tensor], Tensor]) -> None:
    """Replaces the keys and the values of every layer by `change(tensor)`."""
    for layer in states.layers:
        for name in KEYS_AND_VALUES:
            if _is_filled(tensor := getattr(layer, name, None)):
                setattr(layer, name, change(tensor))


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
    """Why a cache cannot be cut by length: it holds more, or less, than keys and values of every position.
    None if it can."""
    for index, layer in enumerate(states.layers):
        if getattr(layer, "is_sliding", False):
            return f"keeps only a window of positions in layer {index}"
        for name, value in vars(layer).items():
            if name not in KEYS_AND_VALUES and _holds_tensors(value):
                return f"keeps {name} beside keys and values in layer {index}"
    return None


def _pairs(states: Any) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    """Keys and values of the layers that have any: some layers share those of others, or have none."""
    for index, layer in enumerate(states.layers):
        keys, values = (getattr(layer, name, None) for name in KEYS_AND_VALUES)
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
