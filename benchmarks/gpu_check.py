"""What `scripts/gpu_check.sh` runs, part by part; a part that fails does not stop the others.

Not yet run on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dspark import __version__
from dspark.kernels import choose

HERE = Path(__file__).resolve().parent
SANITIZER_TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
TOOLKIT = "/usr/local/cuda/bin"
SANITIZER_SECONDS = 1800
NO_GPU = 2

Outcome = dict[str, Any]
"""`ok` (None: not done), `said` (one line), and whatever a part measured."""


def main() -> int:
    """Runs the parts; see `scripts/gpu_check.sh`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="?", type=Path, default=Path("gpu-check.json"))
    options = parser.parse_args()
    device = usable_device()
    if device is None:
        print("gpu_check: there is no GPU that torch could use here", file=sys.stderr)
        return NO_GPU
    choice = choose(torch.device(device))
    results: dict[str, Any] = {
        "dspark": __version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name() if device == "cuda" else "stand-in on the CPU",
        "kernels": choice.reason or (choice.kernels and choice.kernels.architecture),
        "parts": {},
    }
    parts: dict[str, Callable[[str], Outcome]] = {
        "kernels load": kernels_load,
        "compiled": compiled,
        "parity and bandwidth": parity_and_bandwidth,
        **{tool: sanitizer(tool) for tool in SANITIZER_TOOLS},
        "traces and rounds": traces_and_rounds,
    }
    for name, part in parts.items():
        print(f"gpu_check: {name} ...", file=sys.stderr, flush=True)
        results["parts"][name] = guarded(part, device)
        options.results.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))
    print(f"gpu_check: {options.results}", file=sys.stderr)
    return int(any(part["ok"] is False for part in results["parts"].values()))


def usable_device() -> str | None:
    """ "cuda", or "cpu" where a stand-in for the driver is named, or None."""
    if torch.cuda.is_available() and torch.version.hip is None:
        return "cuda"
    return "cpu" if os.environ.get("DSPARK_CUDA_DRIVER") else None


def guarded(part: Callable[[str], Outcome], device: str) -> Outcome:
    """A part's outcome, whatever it raises."""
    try:
        return part(device)
    except Exception as error:  # the other parts still run
        return {"ok": False, "said": " ".join(f"{type(error).__name__}: {error}".split())}


def kernels_load(device: str) -> Outcome:
    """Driver, NVRTC, a first launch whose result torch sees, and every kernel compiled and loaded."""
    from dspark import _core

    choice = choose(torch.device(device))
    if choice.kernels is None:
        return {"ok": False, "said": choice.reason}
    names = [name for _, entries in _core.kernel_units() for name in entries]
    choice.kernels.prepare(names)
    return {"ok": True, "said": f"{len(names)} kernels for {choice.kernels.architecture}"}


def compiled(device: str) -> Outcome:
    """Registers, spills and shared memory on this GPU."""
    choice = choose(torch.device(device))
    arch = [] if choice.kernels is None else ["--arch", choice.kernels.architecture]
    found = json_of([sys.executable, "-m", "dspark.cli", "kernels", *arch, "--json"])
    spilling = [one["entry"] for one in found["kernels"] if one["spills"]]
    budgets = tomllib.loads((HERE.parent / "cuda" / "budgets.toml").read_text())
    by_entry = budgets["registers"]
    wide = [
        one["entry"]
        for one in found["kernels"]
        if one["registers"] > by_entry.get(one["entry"], {}).get(one["architecture"], one["registers"])
    ]
    said = f"{len(found['kernels'])} kernels; spills: {', '.join(spilling) or 'none'}"
    said += f"; over budget: {', '.join(wide) or 'none'}"
    # A compiler other than the budgets' allocates registers differently: perhaps slower, but not wrong.
    compiler = choice.kernels.nvrtc if choice.kernels else torch.version.cuda
    is_ours = compiler == budgets["nvrtc"]
    if (spilling or wide) and not is_ours:
        said += f" (budgets are those of CUDA {budgets['nvrtc']}, this is {compiler}: a note)"
    return {"ok": not (is_ours and (spilling or wide)), "said": said, "kernels": found["kernels"]}


def parity_and_bandwidth(device: str) -> Outcome:
    """`benchmarks/kernels.py`: every kernel against torch, and against the bandwidth of a copy."""
    found = json_of([sys.executable, str(HERE / "kernels.py"), "--device", device, "--json"])
    wrong = [case for case in found["parity"] if not case["ok"]]
    said = f"{len(found['parity']) - len(wrong)} of {len(found['parity'])} cases agree with torch"
    if wrong:
        said += f"; first wrong: {wrong[0]}"
    return {"ok": bool(found["parity"]) and not wrong, "said": said, **found}


def sanitizer(tool: str) -> Callable[[str], Outcome]:
    """compute-sanitizer's `tool` over the parity cases."""

    def run(device: str) -> Outcome:
        program = shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}:{TOOLKIT}")
        if program is None or device != "cuda":
            return {
                "ok": None,
                "said": "compute-sanitizer is not installed" if program is None else "needs a GPU",
            }
        words = [program, "--tool", tool, "--error-exitcode", "9", sys.executable, str(HERE / "kernels.py")]
        try:
            done = subprocess.run(
                [*words, "--device", device, "--parity", "--json"],
                capture_output=True,
                text=True,
                timeout=SANITIZER_SECONDS,
                # torch's allocator hands out pieces of large blocks, whose ends memcheck does not know.
                env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            )
        except subprocess.TimeoutExpired:
            return {"ok": None, "said": f"not through after {SANITIZER_SECONDS} s"}
        lines = [line for line in done.stdout.splitlines() if line.startswith("=========")]
        return {"ok": done.returncode == 0, "said": lines[-1].strip("= ") if lines else done.stderr[-300:]}

    return run


def traces_and_rounds(device: str) -> Outcome:
    """`benchmarks/gpu_rounds.py`."""
    found: Outcome = json_of([sys.executable, str(HERE / "gpu_rounds.py"), "--device", device])
    return found


def json_of(words: list[str]) -> Any:
    """The last line that a program prints, as JSON; if there is none, raises with the end of its errors."""
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode not in (0, 1) or not done.stdout.strip():
        raise RuntimeError(done.stderr.strip()[-500:] or f"exit code {done.returncode}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    words = {True: "good", False: "WRONG", None: "not done"}
    lines = [
        f"dspark {results['dspark']}, torch {results['torch']}, {results['device']}, {results['kernels']}",
        "",
    ]
    lines += ["| part | outcome | |", "|---|---|---|"]
    lines += [f"| {name} | {words[part['ok']]} | {part['said']} |" for name, part in results["parts"].items()]
    bandwidth = results["parts"].get("parity and bandwidth", {}).get("bandwidth", [])
    if bandwidth:
        names = list(dict.fromkeys(name for row in bandwidth for name in row))
        lines += ["", f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
        lines += [f"| {' | '.join(str(row.get(name, '')) for name in names)} |" for row in bandwidth]
    rounds = results["parts"].get("traces and rounds", {}).get("rounds", [])
    if rounds:
        lines += ["", "| what | µs |", "|---|---|"]
        lines += [f"| {row['what']} | {row['microseconds']} |" for row in rounds]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
