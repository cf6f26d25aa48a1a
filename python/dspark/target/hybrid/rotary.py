"""Partial rotation: the first entries of a head are rotated, the others stay as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.checkpoint.rope import RopeConfig
from dspark.layers.norm import RMSNorm
from dspark.layers.rotary import RotaryTable


def whole_head_order(head_dim: int, rotary_dim: int) -> list[int]:
    """The order of a head's entries in which a partial rotation is one of the whole head.

    The published layout pairs entry i with i + rotary_dim / 2, the package's rotation pairs i with
    i + head_dim / 2. Reordering queries and keys alike does not change their products.
    """
    half, turning = head_dim // 2, rotary_dim // 2
    still = half - turning
    first = [*range(turning), *range(rotary_dim, rotary_dim + still)]
    second = [*range(turning, rotary_dim), *range(rotary_dim + still, head_dim)]
    return first + second


def reordered_norm(norm: RMSNorm, order: list[int]) -> RMSNorm:
    """The head norm for heads whose entries are in `order`."""
    copy = RMSNorm(len(order), norm.eps, norm.offset)
    copy.weight = torch.nn.Parameter(norm.weight.detach()[order], requires_grad=False)
    return copy


class PartialRotaryTable(RotaryTable):
    """A `RotaryTable` for heads in `whole_head_order`: unrotated entries have cosine 1 and sine 0."""

    def __init__(
        self, rope: RopeConfig, head_dim: int, rotary_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._still = head_dim // 2 - rotary_dim // 2
        super().__init__(rope, rotary_dim, dtype, device)

    def _compute(self, positions: int) -> Tensor:
        table = super()._compute(positions)
        if not self._still:
            return table
        with torch.inference_mode(False), torch.no_grad():
            halves = table.view(2, positions, 2, -1)
            still = halves.new_zeros(2, positions, 2, self._still)
            still[0] = 1.0
            return torch.cat((halves, still), -1).view(2, positions, -1)
