"""Attention of many blocks over one sequence: a block sees what is strictly before its anchor, and itself.

This is the paper's anchor-bounded packing (section 5.1). On a CPU there are two products, over the context
and over the block, with one softmax, so that no block is multiplied with another's keys; on a GPU,
FlexAttention over all packed blocks skips what the mask hides.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.train.batch import Anchors

BlockAttention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""From queries `[B, N * K, heads, head_dim]` (scaled, rotated), context keys and values `[B, S, key heads,
head_dim]`, block keys and values `[B, N * K, key heads, head_dim]`, to `[B, N * K, heads * head_dim]`."""


KINDS = ("products", "sdpa", "flex")
WIDEST_ON_SM_120 = 128


def block_attention(anchors: Anchors, length: int, width: int, kind: str) -> BlockAttention:
    """The attention of one training pass; `kind` is one of `KINDS`."""
    maker = {"products": _products, "sdpa": _sdpa, "flex": _flex}[kind]
    return maker(anchors, length, width)


def kind_for(device: torch.device, head_dim: int) -> str:
    """The kind to use: on a GPU FlexAttention if it can be compiled, else torch's own; elsewhere products."""
    if device.type != "cuda":
        return "products"
    return "sdpa" if why_not_flex(device, head_dim) else "flex"


def why_not_flex(device: torch.device, head_dim: int) -> str | None:
    """Why FlexAttention cannot be compiled for a GPU, or None: Triton builds its launcher with a C compiler,
    and has no backward pass for wide heads that fits sm_120 (pytorch issue 198224)."""
    if device.type != "cuda":
        return None  # FlexAttention is not used there
    if not os.environ.get("CC") and not any(map(shutil.which, ("gcc", "clang", "cc"))):
        return "FlexAttention needs a C compiler, but none was found"
    if head_dim > WIDEST_ON_SM_120 and torch.cuda.get_device_capability(device)[0] >= 12:
        return f"FlexAttention has no backward pass for heads of {head_dim} on this GPU"
    return None


def _products(anchors: Anchors, length: int, width: int) -> BlockAttention:
    batch, blocks = anchors.positions.shape
    after = torch.arange(length, device=anchors.positions.device) >= anchors.positions[..., None]
    hidden = after[:, None, :, None, :]  # [B, 1, N, 1, S]

    def attend(q: Tensor, context_k: Tensor, context_v: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads, head_dim = q.shape[-2:]
        kv = k.shape[-2]
        groups = heads // kv
        q = q.view(batch, blocks, width, kv, groups, head_dim).permute(0, 3, 1, 4, 2, 5)
        q = q.reshape(batch, kv, blocks * groups * width, head_dim)
        own_k = k.view(batch, blocks, width, kv, head_dim).permute(0, 3, 1, 4, 2)
        own_v = v.view(batch, blocks, width, kv, head_dim).permute(0, 3, 1, 2, 4)
        over_context = (q @ context_k.permute(0, 2, 3, 1)).view(batch, kv, blocks, groups * width, length)
        over_context = over_context.masked_fill(hidden, float("-inf"))
        over_block = q.view(batch, kv, blocks, groups * width, head_dim) @ own_k
        weights = torch.softmax(torch.cat((over_context, over_block), -1), -1)
        out = weights[..., length:] @ own_v
        seen = weights[..., :length].reshape(batch, kv, -1, length) @ context_v.transpose(1, 2)
        out = out + seen.view_as(out)
        out = out.view(batch, kv, blocks, groups, width, head_dim).permute(0, 2, 4, 1, 3, 5)
        return out.reshape(batch, blocks * width, heads * head_dim)

    return attend


def _visible(anchors: Anchors, length: int, width: int) -> Tensor:
    """`[B, N * K, S + N * K]`: what each row of each block sees."""
    blocks, device = anchors.positions.shape[1], anchors.positions.device
    before = torch.arange(length, device=device) < anchors.positions[..., None]
    of_block = torch.arange(blocks, device=device).repeat_interleave(width)
    own = (of_block[:, None] == of_block).expand(len(before), -1, -1)
    return torch.cat((before.repeat_interleave(width, 1), own), -1)


def _sdpa(anchors: Anchors, length: int, width: int) -> BlockAttention:
    mask = _visible(anchors, length, width)[:, None]

    def attend(q: Tensor, context_k: Tensor, context_v: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = torch.cat((context_k, k), 1), torch.cat((context_v, v), 1)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=mask,
            scale=1.0,
            enable_gqa=True,
        )
        return out.transpose(1, 2).flatten(2)

    return attend


def _sees(anchors: Anchors, length: int, width: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """`_visible` entry by entry: given indices of sequence, head, row and key, whether row sees key."""
    positions = anchors.positions

    def sees(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        block = row // width
        in_context = (key < length) & (key < positions[b, block])
        return in_context | ((key >= length) & ((key - length) // width == block))

    return sees


def _flex(anchors: Anchors, length: int, width: int) -> BlockAttention:
    from torch.nn.attention.flex_attention import create_block_mask

    positions = anchors.positions
    rows = positions.shape[1] * width
    sees = _sees(anchors, length, width)
    mask = create_block_mask(sees, len(positions), None, rows, length + rows, device=str(positions.device))
    flex = _compiled_flex()

    def attend(q: Tensor, context_k: Tensor, context_v: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = torch.cat((context_k, k), 1), torch.cat((context_v, v), 1)
        out: Tensor = flex(
            q.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            block_mask=mask,
            scale=1.0,
            enable_gqa=True,
        )
        return out.transpose(1, 2).flatten(2)

    return attend


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)
