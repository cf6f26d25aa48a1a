"""A frozen weight in 16 bits times a few rows: the core's product against torch's, and against float32.

    python benchmarks/products.py [--turns 9] [--dtype bfloat16] [--shapes 576x3072 1536x576 4096x4096]

As many copies of each weight as make 300 MB in float32 take turns, so that weights come from memory and not
from a cache, as in a model. Times are those of one product. "float32" is what a model in float32 uses.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from dspark.layers.half import HalfProduct, serves
from dspark.layers.linear import FusedLinear
from measure import interleaved, machine

ROWS = 1, 2, 4, 6, 8, 16, 64, 512
BYTES = 300 << 20


class Weights:
    """Copies of one weight, as each side multiplies with them."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        self.count = max(1, BYTES // (4 * inputs * outputs))
        self.stored = [torch.randn(outputs, inputs, dtype=dtype) for _ in range(self.count)]
        self.core = [HalfProduct(weight) for weight in self.stored]
        self.wide = [FusedLinear([_linear(weight.float())], release=True) for weight in self.stored]

    def seconds(self, rows: int, turns: int) -> dict[str, float]:
        """Median seconds of one product."""
        x = torch.randn(rows, self.stored[0].shape[1])
        half = x.to(self.stored[0].dtype)
        sides = {
            "core": lambda: [product(half) for product in self.core],
            "torch": lambda: [torch.mm(half, weight.t()) for weight in self.stored],
            "float32": lambda: [product(x) for product in self.wide],
        }
        return {name: one.median / self.count for name, one in interleaved(sides, turns).items()}


def _linear(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--shapes", nargs="+", default=["576x3072", "1536x576", "4096x4096"])
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    used = "use" if serves(dtype, torch.device("cpu")) else "do not use"
    print(f"{machine()}; models here {used} the core's product in {options.dtype}")
    with torch.inference_mode():
        for shape in options.shapes:
            inputs, outputs = map(int, shape.split("x"))
            weights = Weights(inputs, outputs, dtype)
            for rows in ROWS:
                found = weights.seconds(rows, options.turns)
                parts = [f"core {found['core'] * 1e6:6.0f} us"]
                for name in ("torch", "float32"):
                    parts.append(f"{name} {found[name] * 1e6:6.0f} us ({found[name] / found['core']:.1f}x)")
                print(f"{shape:>9}, {rows:2} rows: {', '.join(parts)}", flush=True)


if __name__ == "__main__":
    main()
