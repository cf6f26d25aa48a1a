"""`attend`: grouped-query attention of the newest rows of one sequence."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dspark.attention.visible import Visible

ROWS_AT_ONCE = 512
"""More rows than this are cut into pieces: smaller masks, and less work above the diagonal."""

BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Not cuDNN's, which torch prefers on recent GPUs: it makes a new plan for each number of keys and rows, in
tens to hundreds of milliseconds (FunASR issue 3704, flashinfer issue 5245), and each prompt has new ones."""


def attend(queries: Tensor, keys: Tensor, values: Tensor, visible: Visible, mask: Tensor | None) -> Tensor:
    """Attention of R rows that end at the last of T keys, by `scaled_dot_product_attention`.

    Args:
        queries: `[R, heads, head_dim]`, already scaled by head_dim^-1/2.
        keys: `[key heads, T, head_dim]`, without the first `visible.first`.
        values: likewise.
        visible: what each row sees.
        mask: `visible.mask(...)` on the queries' device, prepared once for all layers; only read if there are
            at most `ROWS_AT_ONCE` rows.

    Returns:
        `[R, heads * head_dim]`.
    """
    if visible.rows <= ROWS_AT_ONCE:
        return _fused(queries, keys, values, mask, visible.triangular)
    pieces = []
    for start in range(0, visible.rows, ROWS_AT_ONCE):
        stop = min(start + ROWS_AT_ONCE, visible.rows)
        part = visible.piece(start, stop)
        seen = slice(part.first - visible.first, part.total - visible.first)
        mask = part.mask(queries.dtype, queries.device)
        pieces.append(attend(queries[start:stop], keys[:, seen], values[:, seen], part, mask))
    return torch.cat(pieces)


def _fused(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, triangular: bool) -> Tensor:
    """Makes each key head an element of the batch, which its group of query heads reads in place: with a mask
    and `enable_gqa`, torch only has an implementation that writes scores out and repeats keys and values."""
    rows, heads, head_dim = queries.shape
    kv_heads, count = values.shape[:2]
    groups = heads // kv_heads
    with _backends(queries):
        out = F.scaled_dot_product_attention(
            queries.view(rows, kv_heads, groups, head_dim).permute(1, 2, 0, 3),
            keys[:, None].expand(kv_heads, groups, count, head_dim),
            values[:, None].expand(kv_heads, groups, count, head_dim),
            attn_mask=mask,
            is_causal=triangular,
            scale=1.0,
        )
    return out.permute(2, 0, 1, 3).reshape(rows, -1)


def _backends(queries: Tensor) -> AbstractContextManager[None]:
    # The choice is the process's, so it is left alone where it makes no difference.
    return nullcontext() if queries.is_cpu else sdpa_kernel(BACKENDS)
