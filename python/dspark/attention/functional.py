"""`attend`: grouped-query attention of the newest rows of one sequence."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS_AT_ONCE = 128
"""Longer prompts are cut into pieces of this many rows: less memory, and no work above the diagonal."""


def attend(queries: Tensor, keys_t: Tensor, values: Tensor, causal: bool, window: int | None = None) -> Tensor:
    """Attention of R rows that end at the last of T keys.

    On a CPU two matrix products with a softmax between them (measured faster than torch's fused attention at
    every shape met here but the very smallest in bf16); elsewhere `scaled_dot_product_attention`.

    Args:
        queries: `[R, heads, head_dim]`, already scaled by head_dim^-1/2.
        keys_t: transposed keys `[key heads, head_dim, T]`. values: `[key heads, T, head_dim]`.
        causal: row i sees keys up to T - R + i; otherwise every row sees all T.
        window: causal only: row i sees no more than the last `window` of these, its own included.

    Returns:
        `[R, heads * head_dim]`.
    """
    rows, total = queries.shape[0], values.shape[1]
    if rows <= ROWS_AT_ONCE:
        return _attend(queries, keys_t, values, causal, window)
    pieces = []
    for start in range(0, rows, ROWS_AT_ONCE):
        stop = min(start + ROWS_AT_ONCE, rows)
        end = total - rows + stop if causal else total
        pieces.append(_attend(queries[start:stop], keys_t[..., :end], values[:, :end], causal, window))
    return torch.cat(pieces)


def _attend(queries: Tensor, keys_t: Tensor, values: Tensor, causal: bool, window: int | None) -> Tensor:
    rows, total = queries.shape[0], values.shape[1]
    if window is not None and total > rows + window - 1:  # keys that no row sees any more
        first = total - (rows + window - 1)
        keys_t, values, total = keys_t[..., first:], values[:, first:], rows + window - 1
    if queries.device.type != "cpu":
        return _fused(queries, keys_t, values, causal, window)
    kv_heads, groups = values.shape[0], queries.shape[1] // values.shape[0]
    head_dim = queries.shape[2]
    grouped = queries.view(rows, kv_heads, groups, head_dim).transpose(0, 1)
    scores = torch.bmm(grouped.reshape(kv_heads, rows * groups, head_dim), keys_t)
    if causal and window is not None:
        scores.add_(_band(rows, total, window, groups, scores.dtype, scores.device))
    elif causal and rows > 1:
        scores[..., total - rows :].add_(_triangle(rows, groups, scores.dtype, scores.device))
    out = torch.bmm(torch.softmax(scores, -1), values)
    return out.view(kv_heads, rows, groups, head_dim).transpose(0, 1).reshape(rows, -1)


def _fused(queries: Tensor, keys_t: Tensor, values: Tensor, causal: bool, window: int | None) -> Tensor:
    rows, total = queries.shape[0], values.shape[1]
    mask = None
    if causal and (rows > 1 or window is not None):
        mask = _band(rows, total, window or total, 1, queries.dtype, queries.device)
    out = F.scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        keys_t.transpose(1, 2)[None],
        values[None],
        attn_mask=mask,
        scale=1.0,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1).reshape(rows, -1)


@lru_cache(maxsize=256)
def _triangle(rows: int, groups: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Additive mask `[rows * groups, rows]` of the newest rows against each other."""
    return _band(rows, rows, rows, groups, dtype, device)


@lru_cache(maxsize=16)
def _band(
    rows: int, total: int, window: int, groups: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Additive mask `[rows * groups, total]`: row i sees keys p - window + 1 .. p with p = total - rows + i."""
    with torch.inference_mode(False):  # kept for later calls, which may want gradients
        last = torch.arange(total - rows, total, device=device)[:, None]
        keys = torch.arange(total, device=device)
        hidden = (keys > last) | (keys <= last - window)
        mask = torch.zeros(rows, total, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
        return mask.repeat_interleave(groups, 0)
