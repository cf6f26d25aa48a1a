"""Muon for the matrices of a draft."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from dspark.devices import has_fast_products
from dspark.errors import ConfigError

MATCH_ADAM = 0.2
"""An update's root mean square, about Adam's (arXiv 2502.16982, section 2.2)."""


def check_muon(sharded: bool) -> None:
    """
    Raises:
        ConfigError: matrices are sharded.
    """
    if sharded:
        raise ConfigError("Muon needs whole matrices: use --parallel ddp, or fsdp without --muon")


def muon_of(matrices: list[nn.Parameter], weight_decay: float) -> torch.optim.Muon:
    """torch's Muon, or `Float32Muon` where bfloat16 is not faster; errors as in `check_muon`.

    Updates are as large as Adam's, so both can have one rate.
    """
    check_muon(sharded=any(type(matrix.data) is not torch.Tensor for matrix in matrices))
    fast = has_fast_products(torch.bfloat16, matrices[0].device)
    kind = torch.optim.Muon if fast else Float32Muon
    return kind(matrices, lr=0.0, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")


class Float32Muon(torch.optim.Muon):
    """torch's Muon with the same state, but its iteration in float32.

    torch iterates in bfloat16 whatever the parameters are in. A CPU without AVX512-BF16 gains nothing from
    this, and one with AVX2 alone has no bfloat16 products: there, steps of a two-layer draft took 54 s, and
    take 4.5 s with this class.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Takes one step of every group; there is no closure to call."""
        for group in self.param_groups:
            momentum, rate = group["momentum"], group["lr"]
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(matrix.grad)
                average = state["momentum_buffer"]
                average.lerp_(matrix.grad, 1 - momentum)
                update = matrix.grad.lerp(average, momentum) if group["nesterov"] else average
                update = orthogonal(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
                matrix.mul_(1 - rate * group["weight_decay"])
                matrix.add_(update, alpha=-rate * MATCH_ADAM * math.sqrt(max(matrix.shape)))


def orthogonal(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Approximates U V^T of a matrix U S V^T by the quintic Newton-Schulz iteration of Muon
    (https://kellerjordan.github.io/posts/muon), which brings all singular values to around 1."""
    a, b, c = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.float().T if tall else matrix.float()
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
