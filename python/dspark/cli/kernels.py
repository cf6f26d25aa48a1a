"""Lists the CUDA kernels with what they use, compiling what is not in the cache yet.

Compiling needs no GPU, only torch's compiler. What is compiled stays in the cache, so that a decoder starts
at once.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from os import cpu_count
from typing import Any

from dspark.cli.show import Progress, print_json, print_text, say, table

TESTED = ("sm_80", "sm_90a", "sm_100a", "sm_120")
"""The architectures for which the tests compile every kernel."""

HELP = "list the CUDA kernels and compile them ahead of time"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `dspark kernels`."""
    parser.add_argument(
        "--arch",
        nargs="+",
        metavar="SM",
        help="architectures, such as sm_80 sm_90a (default: the GPU's here; without one, all tested ones)",
    )


def run(options: argparse.Namespace) -> int:
    """Runs `dspark kernels`."""
    progress = Progress(silent=options.json)
    progress("starting torch", 0, 1)
    from dspark import _core
    from dspark.kernels import find_nvrtc, kernel_cache

    nvrtc, cache = find_nvrtc(), kernel_cache()
    jobs = [(name, arch) for arch in options.arch or _here() for name, _ in _core.kernel_units()]
    found: list[dict[str, Any]] = []
    with ThreadPoolExecutor(cpu_count() or 1) as pool:
        for done, ((name, arch), (kept, entries)) in enumerate(
            zip(jobs, pool.map(lambda job: _core.compile_kernels(nvrtc, cache, *job), jobs), strict=True)
        ):
            progress("compiling", done + 1, len(jobs))
            found += [{"unit": name, "architecture": arch, **entry, "kept": kept} for entry in entries]
    progress.clear()
    if options.json:
        print_json({"nvrtc": nvrtc, "cache": cache, "kernels": found})
        return 0
    rows = [("kernel", "architecture", "registers", "spilled bytes", "stack", "shared bytes", "")]
    for one in found:
        numbers = (str(one[name]) for name in ("registers", "spills", "stack", "shared"))
        rows.append((one["entry"], one["architecture"], *numbers, "kept" if one["kept"] else "compiled"))
    print_text(table(rows))
    say(f"compiled by {nvrtc}, stored in {cache}")
    return 0


def _here() -> tuple[str, ...]:
    import torch

    from dspark._core import kernel_architecture

    if torch.version.cuda is None or not torch.cuda.is_available():
        return TESTED
    major, minor = torch.cuda.get_device_capability()
    return (kernel_architecture(10 * major + minor),)
