"""Rewrites cuda/budgets.toml with the registers that kernels use now, rounded up to multiples of eight."""

from pathlib import Path

import torch

from dspark import _core
from dspark.cli.kernels import TESTED
from dspark.kernels import find_nvrtc, kernel_cache

STEP = 8
"""Threads get registers in units of eight."""

HEAD = """\
# Registers of a thread that each kernel may use, by architecture, compiled by this version of NVRTC: others
# allocate differently. test_cuda_compile.py holds kernels to it, so that growth is seen; `python
# scripts/kernel_budgets.py` writes what they use now, in whole eights.
nvrtc = "{version}"

[registers]
"""


def main() -> None:
    """Writes the file."""
    nvrtc, cache = find_nvrtc(), kernel_cache()
    lines = [HEAD.format(version=torch.version.cuda)]
    for unit, _ in _core.kernel_units():
        used: dict[str, list[str]] = {}
        for architecture in TESTED:
            for one in _core.compile_kernels(nvrtc, cache, unit, architecture)[1]:
                budget = -(-one["registers"] // STEP) * STEP
                used.setdefault(one["entry"], []).append(f"{architecture} = {budget}")
        lines += [f"{entry} = {{ {', '.join(each)} }}\n" for entry, each in used.items()]
    (Path(__file__).parents[1] / "cuda" / "budgets.toml").write_text("".join(lines))


if __name__ == "__main__":
    main()
