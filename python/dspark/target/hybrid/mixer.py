"""A linear layer's weights, ready for inference."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dspark.layers.frozen import normed_product
from dspark.layers.linear import FusedLinear
from dspark.layers.norm import accumulation_dtype, scaled_weight
from dspark.target.hybrid.config import DeltaSizes
from dspark.target.hybrid.modules import DeltaDecay, HybridLayer

UNIT_EPS = 1e-6
"""Added under the root in the lengths of queries and keys; a constant of the architecture, in no config."""


class DeltaWeights:
    """One product for everything that reads the input (queries, keys, values, gate z, b, a), and what the
    delta rule needs; states and their arithmetic are in float32, or in float64 for a float64 model.

    The outputs are normed per head: y = w o / sqrt(mean(o^2) + eps). Queries are not scaled, so o is too long
    by a factor key_dim^1/2; with key_dim eps in place of eps, the norm removes it. Where the dtype is precise
    enough, w is folded into the output product.
    """

    __slots__ = (
        "addresses",
        "head_shift",
        "head_weight",
        "norm",
        "output",
        "product",
        "rate",
        "taps",
        "time_bias",
        "unit_shift",
    )

    def __init__(self, layer: HybridLayer, decay: DeltaDecay, sizes: DeltaSizes) -> None:
        mixer = layer.linear_attn
        self.norm, self.product = normed_product(
            layer.input_layernorm, [mixer.in_proj_qkv, mixer.in_proj_z, mixer.in_proj_b, mixer.in_proj_a]
        )
        dtype = mixer.out_proj.weight.dtype
        wide = accumulation_dtype(dtype)
        by_head = (sizes.key_heads, sizes.groups, 1)
        self.taps = mixer.conv1d.weight.detach().to(wide)[:, 0].t().contiguous().unbind(0)
        self.rate = decay.A_log.detach().to(wide).exp().neg_().view(by_head)
        self.time_bias = decay.dt_bias.detach().to(wide).view(by_head)
        device = self.rate.device
        self.unit_shift = torch.tensor(math.sqrt(UNIT_EPS), dtype=wide, device=device)
        shift = math.sqrt(sizes.value_dim * sizes.key_dim * decay.norm.eps)
        self.head_shift = torch.tensor(shift, dtype=wide, device=device)
        head_weight = scaled_weight(decay.norm).to(wide).repeat(sizes.value_heads)
        self.head_weight = head_weight if wide != dtype else None
        self.output = FusedLinear([mixer.out_proj], head_weight if wide == dtype else None)
        self.addresses = (
            self.taps[0].data_ptr(),
            self.rate.data_ptr(),
            self.time_bias.data_ptr(),
            0 if self.head_weight is None else self.head_weight.data_ptr(),
            UNIT_EPS,
            shift * shift,
        )
        """Addresses of what a kernel reads (`[taps, channels]`, two vectors with an entry per value head,
        `[values]` or 0), then what it adds to the squared lengths of queries and keys, and of outputs."""

    def norm_heads(self, out: Tensor) -> Tensor:
        """Outputs `[B, key heads, groups, N, value_dim]` to normed rows `[B * N, values]`."""
        batch, heads, groups, count, value_dim = out.shape
        length = torch.linalg.vector_norm(out, 2, -1, True).hypot_(self.head_shift)
        unit = out.new_empty(batch, count, heads, groups, value_dim)
        torch.div(out.permute(0, 3, 1, 2, 4), length.permute(0, 3, 1, 2, 4), out=unit)
        unit = unit.view(batch * count, -1)
        return unit if self.head_weight is None else unit.mul_(self.head_weight)
