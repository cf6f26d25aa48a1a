"""`attend`: grouped-query attention of the newest rows of one sequence."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dspark.attention.visible import Visible

ROWS_AT_ONCE = 128
"""More rows than this are cut into pieces: less memory, and no work above the diagonal."""

BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Not cuDNN's, which torch prefers on recent GPUs: it makes a new plan for each number of keys and rows, in
tens to hundreds of milliseconds (FunASR issue 3704, flashinfer issue 5245), and each prompt has new ones."""


def attend(queries: Tensor, keys_t: Tensor, values: Tensor, visible: Visible, mask: Tensor | None) -> Tensor:
    """Attention of R rows that end at the last of T keys.

    On a CPU these are two matrix products with a softmax between them, measured to be faster than torch's
    fused attention at every shape that occurs here (9/3 heads of 64, 1 to 64 rows, 40 to 2,000 keys: 1.1 to
    1.3 times in f32, 1.1 to 5 times in bf16), except for a few tens of keys in bf16. Elsewhere it is
    `scaled_dot_product_attention`.

    Args:
        queries: `[R, heads, head_dim]`, already scaled by head_dim^-1/2.
        keys_t: transposed keys `[key heads, head_dim, T]`, without the first `visible.first`.
        values: `[key heads, T, head_dim]`, likewise.
        visible: what each row sees.
        mask: `visible.mask(...)` on the queries' device, prepared once for all layers; only read if there are
            at most `ROWS_AT_ONCE` rows.

    Returns:
        `[R, heads * head_dim]`.
    """
    if visible.rows <= ROWS_AT_ONCE:
        if queries.is_cpu:
            return _two_products(queries, keys_t, values, mask)
        return _fused(queries, keys_t, values, mask)
    pieces = []
    groups = queries.shape[1] // values.shape[0]
    for start in range(0, visible.rows, ROWS_AT_ONCE):
        stop = min(start + ROWS_AT_ONCE, visible.rows)
        part = visible.piece(start, stop)
        keys = slice(part.first - visible.first, part.total - visible.first)
        mask = part.mask(groups, queries.dtype, queries.device)
        pieces.append(attend(queries[start:stop], keys_t[..., keys], values[:, keys], part, mask))
    return torch.cat(pieces)


def _two_products(queries: Tensor, keys_t: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    rows, heads, head_dim = queries.shape
    kv_heads = values.shape[0]
    groups = heads // kv_heads
    if rows == 1:
        scores = torch.bmm(queries.view(kv_heads, groups, head_dim), keys_t)
        if mask is not None:
            scores += mask
        return torch.bmm(torch.softmax(scores, -1), values).view(1, -1)
    grouped = queries.view(rows, kv_heads, groups, head_dim).transpose(0, 1)
    grouped = grouped.reshape(kv_heads, rows * groups, head_dim)
    scores = torch.bmm(grouped, keys_t) if mask is None else torch.baddbmm(mask, grouped, keys_t)
    out = torch.bmm(torch.softmax(scores, -1), values)
    return out.view(kv_heads, rows, groups, head_dim).transpose(0, 1).reshape(rows, -1)


def _fused(queries: Tensor, keys_t: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Makes each key head an element of the batch, which its group of query heads reads in place: with a mask
    and `enable_gqa`, torch only has an implementation that writes scores out and repeats keys and values."""
    rows, heads, head_dim = queries.shape
    kv_heads, keys = values.shape[:2]
    groups = heads // kv_heads
    with sdpa_kernel(BACKENDS):
        out = F.scaled_dot_product_attention(
            queries.view(rows, kv_heads, groups, head_dim).permute(1, 2, 0, 3),
            keys_t.transpose(1, 2)[:, None].expand(kv_heads, groups, keys, head_dim),
            values[:, None].expand(kv_heads, groups, keys, head_dim),
            attn_mask=mask,
            scale=1.0,
        )
    return out.permute(2, 0, 1, 3).reshape(rows, -1)
