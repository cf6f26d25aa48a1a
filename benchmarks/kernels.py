"""The CUDA kernels: what each has to move at the flagship's sizes, whether it agrees with torch and with the
core, and how close it comes to the bandwidth of a copy.

    python benchmarks/kernels.py --table [--bandwidth 3350] [--requests 8] [--context 8192]
    python benchmarks/kernels.py [--device cuda] [--json] [--parity]

`--table` needs no GPU. Without it, every kernel is compared (with `--parity`, nothing else is done), then
timed at the flagship's sizes against a device copy, torch's SDPA and, if it is installed, FlashInfer. A case
that fails is reported and the others follow, unless the device itself has failed. `--json` prints one line of
JSON. On the CPU it needs DSPARK_CUDA_DRIVER, compares small shapes and times nothing. Not yet run on a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

import roofline
from dspark.kernels import Choice, choose
from dspark.target.hybrid.config import DeltaSizes
from kernel_cases import AttentionCase, DeltaCase
from sampling_cases import TIMED, SamplingCase

HALF = torch.bfloat16
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FLAGSHIP = DeltaSizes(
    key_heads=roofline.DELTA_KEY_HEADS,
    value_heads=roofline.DELTA_HEADS,
    key_dim=roofline.DELTA_DIM,
    value_dim=roofline.DELTA_DIM,
    kernel=roofline.TAPS,
)
SMALL = DeltaSizes(key_heads=2, value_heads=4, key_dim=16, value_dim=16, kernel=4)
TWO_HEADS = DeltaSizes(key_heads=1, value_heads=2, key_dim=128, value_dim=128, kernel=4)
SAMPLED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.8, "rule": "coupled"},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.1},
    {"temperature": 0.8, "logit_bias": {7: 3.0, 11: -100.0}, "min_tokens": 8, "stop_token_ids": [2, 5]},
)
PROMPTS = [(0, 33), (31, 130), (100, 301)]
"""Positions before, and rows: more than the kernel takes, and more than one piece of torch's has. With 33 and
161 keys fused attention has been seen to be wrong (pytorch issue 191937)."""
TURNS = 20
CLOCK = 2e9
"""Cycles per second, at least as many as a GPU has."""

Row = dict[str, Any]


def main() -> int:
    """See the module's docstring. Exit code 1: a kernel is wrong; 2: there are none here."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--bandwidth", type=float, default=3350.0, help="GB/s, for --table")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--rows", type=int, default=8, help="of each request to verify")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--parity", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    setting = roofline.Setting(options.requests, options.rows, (options.rows + 1) // 2, options.context)
    if options.table:
        print(roofline.table(setting, options.bandwidth))
        return 0
    device = torch.device(options.device)
    choice = choose(device)
    if choice.kernels is None:
        print(f"no kernels: {choice.reason}", file=sys.stderr)
        return 2
    found: dict[str, list[Row]] = {"parity": [], "bandwidth": []}
    with torch.inference_mode():
        for kernel, what, compare in cases(choice, device):
            found["parity"].append(judged(kernel, what, compare))
            if not works(device):
                break
        if device.type == "cuda" and not options.parity and works(device):
            for part in bandwidth(choice, device, setting):
                found["bandwidth"].append(part)
                if not works(device):
                    break
    print(json.dumps(found) if options.json else report(found))
    failed = any("failed" in part for part in found["bandwidth"])
    return int(failed or not works(device) or not all(case["ok"] for case in found["parity"]))


def works(device: torch.device) -> bool:
    """Whether anything runs on the device: after a fault there, nothing does in this process."""
    try:
        return bool(torch.ones(1, device=device).item())
    except RuntimeError:
        return False


Compare = Callable[[], tuple[float, float]]


def cases(choice: Choice, device: torch.device) -> Iterator[tuple[str, str, Compare]]:
    """Every kernel against float64, torch's operations or the core, and torch's attention for prompts, as
    (kernel, case, a function that makes and compares it)."""
    small = device.type == "cpu"
    segments = [(0, 1), (17, 7), (300, 8), (129, 16)] if small else [(0, 1), (17, 7), (5000, 8), (4095, 16)]
    for dtype in DTYPES:
        for shape in ((4, 2, 64), (6, 1, 128), (roofline.HEADS, roofline.KEY_HEADS, roofline.HEAD_DIM)):
            for causal, window in ((True, None), (True, 128), (False, None)):
                made = partial(AttentionCase, choice, device, dtype, shape, segments, causal, window)
                what = f"{shape[0]}/{shape[1]} heads of {shape[2]}, causal {causal}, window {window}, {dtype}"
                yield "attention", what, partial(compared, made)
        for head_dim in (64, 128, 256, 512):
            made = partial(AttentionCase, choice, device, dtype, (8, 2, head_dim), PROMPTS, True)
            yield "torch's, of prompts", f"heads of {head_dim}, {dtype}", partial(compared_torchs, made)
        for sizes, layers in ((SMALL, 2), (TWO_HEADS if small else FLAGSHIP, 1)):
            what = f"{sizes.value_heads} heads of {sizes.value_dim} in layers: {layers}, {dtype}"
            made = partial(DeltaCase, choice, device, dtype, sizes, layers, [1, 7, 8, 16])
            yield "delta", what, partial(compared, made)
        for given in SAMPLED:
            vocabulary = 3000 if small else 50_000
            sampling = (choice, device, dtype, 6, roofline.BLOCK, vocabulary, 32)
            yield "sampling", f"{given}, {dtype}", partial(decided, partial(SamplingCase, *sampling, **given))
    # With many heads, chunks are long: on 132 multiprocessors, thousands of keys in one running sum.
    long = (8, 8, 64, 3000) if small else (64, 64, 64, 16_384)
    made = partial(AttentionCase, choice, device, torch.float32, long[:3], [(long[3], 8)], True)
    yield "attention", f"long chunks: {long[1]} heads behind {long[3]} keys", partial(compared, made)


def compared(make: Callable[[], AttentionCase | DeltaCase]) -> tuple[float, float]:
    """Makes the case here, where a failure counts as its own."""
    return make().compare()


def compared_torchs(make: Callable[[], AttentionCase]) -> tuple[float, float]:
    """The same for torch's attention, which prompts go through: `compared` has no rows of theirs."""
    return make().compare_torchs()


def decided(make: Callable[[], SamplingCase]) -> tuple[float, float]:
    """The number of decisions that differ from the core's by more than rounding; none are allowed."""
    return make().differences()[0], 0


def judged(kernel: str, what: str, compare: Compare) -> Row:
    """One comparison; neither a NaN nor an exception counts as agreement."""
    row: Row = {"kernel": kernel, "case": what, "error": None, "allowed": None, "ok": False}
    try:
        error, allowed = compare()
    except Exception as raised:  # the other cases still run
        return row | {"failed": words(raised)}
    return row | {"error": error, "allowed": allowed, "ok": error <= allowed}


def words(raised: Exception) -> str:
    """An exception in one line."""
    return " ".join(f"{type(raised).__name__}: {raised}".split())[:300]


@dataclass
class Measured:
    """What is timed: our side, how often it launches what `work` describes, and what to compare with, made
    when its turn comes."""

    work: roofline.Work
    run: Callable[[], object]
    launches: int
    others: Mapping[str, Callable[[], Callable[[], object]]]


def bandwidth(choice: Choice, device: torch.device, setting: roofline.Setting) -> Iterator[Row]:
    """Microseconds, and bytes that must move as a share of what a copy moves in that time."""
    copied = copy_bandwidth(device)
    yield {"kernel": "device copy", "GB/s": round(copied)}
    for parts in (attention, delta, sampling):
        try:
            for part in parts(choice, device, setting):
                yield row(part, copied)
        except Exception as raised:  # the other kernels still run
            yield {"kernel": parts.__name__, "failed": words(raised)}


def row(part: Measured, copied: float) -> Row:
    """One line of the table."""
    microseconds = timed(part.run) / part.launches
    moved = part.work.bytes / microseconds / 1e3
    found: Row = {
        "kernel": part.work.kernel,
        "shape": part.work.shape,
        "µs": round(microseconds, 1),
        "GB/s": round(moved),
        "of a copy": f"{moved / copied:.0%}",
    }
    for name, make in part.others.items():
        try:
            found[f"{name} µs"] = round(timed(make()) / part.launches, 1)
        except Exception as error:  # another library's: it may be absent, or expect other arguments
            found[f"{name} µs"] = words(error)[:80]
    return found


def attention(choice: Choice, device: torch.device, s: roofline.Setting) -> Iterator[Measured]:
    """One layer of a verify pass, and one of a draft block."""
    verify = (roofline.HEADS, roofline.KEY_HEADS, roofline.HEAD_DIM)
    draft = (roofline.DRAFT_HEADS, roofline.DRAFT_KEY_HEADS, roofline.DRAFT_HEAD_DIM)
    for work, shape, rows, causal in (
        (roofline.verify_attention(s), verify, s.rows, True),
        (roofline.draft_attention(s), draft, roofline.BLOCK, False),
    ):
        case = AttentionCase(choice, device, HALF, shape, [(s.context, rows)] * s.requests, causal)
        others = {"torch": as_it_is(case.by_torch), "SDPA": case.sdpa, "FlashInfer": case.flashinfer}
        yield Measured(work, case.run, 1, others)


def delta(choice: Choice, device: torch.device, s: roofline.Setting) -> Iterator[Measured]:
    """All linear layers of a pass, and the commits of its requests."""
    case = DeltaCase(choice, device, HALF, FLAGSHIP, roofline.LAYERS_DELTA, [s.rows] * s.requests)
    rows, kept = partial(case.rows, 1), [s.kept] * s.requests
    commit = partial(case.commit, 1, kept)
    yield Measured(roofline.delta_rows(s), partial(case.rows, 0), case.layers, {"torch": as_it_is(rows)})
    yield Measured(
        roofline.delta_commit(s), partial(case.commit, 0, kept), s.requests, {"torch": as_it_is(commit)}
    )


def sampling(choice: Choice, device: torch.device, s: roofline.Setting) -> Iterator[Measured]:
    """Verdict and chain of a batch, including copies of plans and outcomes, which are waited for."""
    block = s.rows - 1
    for params in TIMED:
        case = SamplingCase(
            choice, device, HALF, s.requests, block, roofline.VOCABULARY, roofline.RANK, **params
        )
        ids = [tokens + [0] * (block - len(tokens)) for tokens, _ in case.chain()]
        said = ", ".join(f"{name} {value}" for name, value in params.items())
        verdict, step = (
            replace(work, shape=f"{work.shape}, {said}")
            for work in (roofline.verify_sampling(s), roofline.markov_step(s))
        )
        yield Measured(verdict, partial(case.run, case.verify_plan(ids)), 1, {})
        yield Measured(step, partial(case.run, case.chain_plan()), block, {})


def as_it_is(run: Callable[[], object]) -> Callable[[], Callable[[], object]]:
    """A side that needs no preparation."""
    return lambda: run


def timed(run: Callable[[], object], turns: int = TURNS) -> float:
    """Microseconds of one call, the median, by the device's own clock.

    The device is kept busy until the host has handed over all of the call, so that the device's work is timed
    and not the host's. If a call waits for an outcome before its end, its waits are timed too.
    """
    for _ in range(3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        handed_over = time.perf_counter() - began
    cycles = int((2 * handed_over + 2e-4) * CLOCK)
    samples = []
    for _ in range(turns):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(cycles)
        start.record()
        run()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1e3)
    return statistics.median(samples)


def copy_bandwidth(device: torch.device) -> float:
    """GB/s, read and written, of a copy of 1 GiB."""
    source = torch.ones(1 << 28, device=device)
    target = torch.empty_like(source)
    return 2 * 4 * source.numel() / timed(lambda: target.copy_(source)) / 1e3


def report(found: dict[str, list[Row]]) -> str:
    """The results as text."""
    lines = []
    for case in found["parity"]:
        word = "good " if case["ok"] else "WRONG"
        said = case.get("failed") or f"{case['error']:.2g} of {case['allowed']:.2g}"
        lines.append(f"{word} {case['kernel']}: {case['case']}, {said}")
    lines += [", ".join(f"{name} {value}" for name, value in row.items()) for row in found["bandwidth"]]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
