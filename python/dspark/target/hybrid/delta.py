"""The gated delta rule in closed form over a few rows, so that a rollback is free.

The rule (Gated DeltaNet, arXiv 2412.06464), per head with state S `[key_dim, value_dim]`, decay a_t in (0, 1]
and strength b_t:

    u_t = b_t (v_t - a_t S_{t-1}^T k_t),    S_t = a_t S_{t-1} + k_t u_t^T,    o_t = S_t^T q_t.

With c_t = a_1 ... a_t the state after m rows is

    S_m = c_m S_0 + sum over s <= m of (c_m / c_s) k_s u_s^T,

so all that a pass must keep of a row is k, u and log a: u_s never depends on later rows, whatever is
rejected. `rows` computes u and o from S_0 alone and leaves S_0 as it is; `carry` forms S_m once it is known
how many rows are kept. No state is copied before a pass, none is restored, and no row is computed twice.

The u_t solve a unit lower triangular system: u_t + b_t sum over s < t of (c_t / c_s)(k_t . k_s) u_s =
b_t (v_t - c_t S_0^T k_t).
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

AT_ONCE = 64
"""Most rows of one triangular system; longer passes are cut into pieces of this size."""

CACHED_BYTES = 8 << 20
"""States larger than this are carried layer by layer, so that a layer's state is still in the CPU's cache
between its decay and its update."""


def rows(
    queries_keys: Tensor, values: Tensor, log_decay: Tensor, beta: Tensor, read: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs and updates of at most `AT_ONCE` rows that follow a state.

    Args:
        queries_keys: `[B, key heads, 2, N, key_dim]`, contiguous: queries, then keys.
        values: `[B, key heads, groups, N, value_dim]`.
        log_decay, beta: `[B, key heads, groups, N]`.
        read: `[B, key heads, 2, N, groups, value_dim]`, queries and keys times the state before the rows.

    Returns:
        o and u, `[B, key heads, groups, N, value_dim]`.
    """
    batch, heads, _, count, key_dim = queries_keys.shape
    flat = queries_keys.view(batch * heads, 2 * count, key_dim)
    scores = torch.bmm(flat, flat[:, count:].transpose(1, 2)).view(batch, heads, 2, 1, count, count)
    read = read.transpose(3, 4)  # [B, key heads, 2, groups, N, value_dim]
    beta = beta.unsqueeze(-1)
    if count == 1:
        decay = log_decay.exp().unsqueeze(-1)
        updates = torch.addcmul(values, read[:, :, 1], decay, value=-1).mul_(beta)
        return torch.addcmul(scores[:, :, 0] * updates, read[:, :, 0], decay), updates
    sums = log_decay.cumsum(-1)
    decay = sums.exp().unsqueeze(-1)
    between = sums.unsqueeze(-1) - sums.unsqueeze(-2)
    between = between.add_(_later_rows(count, sums.dtype, sums.device)).exp_()
    system = (scores[:, :, 1] * between).mul_(beta)
    known = torch.addcmul(values, read[:, :, 1], decay, value=-1).mul_(beta)
    updates = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    out = torch.matmul(between.mul_(scores[:, :, 0]), updates)
    return out.addcmul_(read[:, :, 0], decay), updates


@lru_cache(maxsize=256)
def _later_rows(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """-inf above the diagonal, `[count, count]`."""
    with torch.inference_mode(False):
        return torch.full((count, count), float("-inf"), dtype=dtype, device=device).triu_(1)


def read_state(queries_keys: Tensor, state: Tensor) -> Tensor:
    """Queries and keys `[key heads, 2, N, key_dim]` times a state `[key heads, key_dim, groups, value_dim]`:
    `[key heads, 2, N, groups, value_dim]`."""
    heads, _, count, key_dim = queries_keys.shape
    product = torch.bmm(queries_keys.view(heads, 2 * count, key_dim), state.view(heads, key_dim, -1))
    return product.view(heads, 2, count, *state.shape[2:])


def carry(state: Tensor, keys: Tensor, log_decay: Tensor, updates: Tensor) -> None:
    """Applies m rows to the states, in place.

    Args:
        state: `[layers, key heads, key_dim, groups, value_dim]`.
        keys: `[layers, key heads, m, key_dim]`.
        log_decay: `[layers, key heads, groups, m]`.
        updates: `[layers, key heads, groups, m, value_dim]`.
    """
    layers, heads, key_dim, groups, value_dim = state.shape
    count = keys.shape[2]
    if count == 1:
        decay, weighted = log_decay.exp(), updates.transpose(2, 3)
    else:
        sums = log_decay.cumsum(-1)
        last = sums[..., -1:]
        decay = last.exp()
        weighted = (updates * (last - sums).exp_().unsqueeze(-1)).transpose(2, 3)
    weighted = weighted.reshape(layers, heads, count, groups * value_dim)
    keys_t, decay = keys.transpose(2, 3), decay.unsqueeze(2)
    step = layers if state.numel() * state.element_size() <= CACHED_BYTES else 1
    for start in range(0, layers, step):
        part = slice(start, start + step)
        state[part].mul_(decay[part])
        flat = state[part].view(-1, key_dim, groups * value_dim)
        flat.baddbmm_(keys_t[part].flatten(0, 1), weighted[part].flatten(0, 1))
