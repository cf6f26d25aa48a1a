"""Checks of inputs and handling of taps that every target's pass shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dspark.errors import ConfigError

EMBEDDINGS_TAP = -1


def check_pass(token_ids: Tensor, segments: Sequence[tuple[Any, int]], logits: str) -> None:
    """
    Raises:
        ConfigError: the token ids are not one for each row of the segments, or `logits` is unknown.
    """
    rows = sum(n for _, n in segments)
    if token_ids.dim() != 1 or token_ids.shape[0] != rows or any(n < 1 for _, n in segments):
        lengths = [n for _, n in segments]
        raise ConfigError(
            f"the target's pass got token ids of shape {tuple(token_ids.shape)} for segments of "
            f"{lengths} rows"
        )
    if logits not in ("all", "last", "hidden"):
        raise ConfigError(f"logits must be 'all', 'last' or 'hidden', found {logits!r}")


def side_by_side(outputs: dict[int, Tensor | None], taps: Sequence[int]) -> Tensor | None:
    """The tapped outputs `[rows, taps * hidden]`, or None without taps; a tap that was not reached raises
    `ConfigError`."""
    return torch.cat([_reached(outputs, tap) for tap in taps], dim=-1) if taps else None


def last_rows(segments: Sequence[tuple[Any, int]]) -> slice | list[int]:
    """The index of each segment's last row."""
    if len(segments) == 1:
        return slice(-1, None)
    ends, row = [], 0
    for _, n in segments:
        row += n
        ends.append(row - 1)
    return ends


def _reached(outputs: dict[int, Tensor | None], tap: int) -> Tensor:
    tapped = outputs[tap]
    if tapped is None:
        raise ConfigError(f"layer {tap} cannot be tapped: the target has no such layer")
    return tapped
