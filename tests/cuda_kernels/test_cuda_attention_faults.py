"""The attention kernel under sanitizers, and faults planted in its source: each of them is seen."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest
import torch

import cuda_host
from attention_cases import NAMES, Case
from cuda_host import EMULATE, KERNELS, KernelFault, Launcher, Library

F32, BF16 = torch.float32, torch.bfloat16
TOLERANCE = {F32: 1e-5, BF16: 2e-2}
QUIET = "-Wno-unused"  # of what a fault no longer uses

# What to replace in the kernel's text, where it stands once, and by what.
SEEN = {
    "barrier of the ring": ("kStages - 2>();\n      __syncthreads();", "kStages - 2>();"),
    "wait for a copy": ("await_copies<kStages - 2>", "await_copies<kStages>"),
    "page": ("position >> args.page_shift;", "(position + 1) >> args.page_shift;"),
    "later rows": ("causal ? own + 1 :", "causal ? own + 2 :"),
    "window": ("own + 1 - window", "own - window"),
    "scale in the merge": ("sums[p][i] * before + pack.at[i] * now", "sums[p][i] + pack.at[i]"),
    "new rows kept": ("if (blockIdx.z == 0) keep_fresh();", ""),
}
SEEN_TOO = {
    "scores of both warps": ("look(scores, exchange);", ""),
    "columns of the other warp": ("return part * S::columns +", "return"),
    "stage taken too early": ("fetch(step + kStages - 1);", "fetch(step + kStages);"),
    "place within a page": ("(position - (page <<", "(position + 1 - (page <<"),
    "what all rows see": ("of(rows - 1, rows, length)", "of(0, rows, length)"),
    "scale of earlier sums": ("    sum *= factor;\n", ""),
    "scale of earlier values": ("n % 4] *= factors[n % 4 / 2]", "n % 4] *= 1"),
    "head of a group": ("query % args.groups; }", "query / args.groups % args.groups; }"),
    "values as keys": ("cache + which * to_values", "cache + 0 * to_values"),
    "low bits of a rest": ("(leading(x))) & 0xffffe000u", "(leading(x)))"),
}
OTHERS = {
    "transposed values": ("load_transposed(b,", "load_matrices(b,"),
    "end of a chunk": ("const bool wanted = position < stop;", "const bool wanted = true;"),
    "barrier between scores": ("      __syncthreads();\n", "      if (step % 2 == 0) __syncthreads();\n"),
}


def small(dtype: torch.dtype) -> Case:
    """Several tiles for each warp, so that stages of the ring are used again; two chunks; a window."""
    return Case([(250, 3), (3, 2)], dtype, 1, 6, 16, window=240, page=8, chunk=160)


def run(host: Launcher, case: Case) -> bool:
    """Whether outcome and caches are right."""
    case.run(host)
    case.check_caches()
    return case.largest_error() < TOLERANCE[case.dtype]


def unit(dtype: torch.dtype, size: int, fault: str | None = None) -> Path:
    """A unit with the instances of one head size, beside headers of which one has the fault. The folder is
    named by what is in it."""
    texts = {path.name: path.read_text() for path in KERNELS.glob("*.cuh") if path.name != "device.cuh"}
    if fault is not None:
        right, wrong = (SEEN | SEEN_TOO | OTHERS)[fault]
        (header,) = [name for name, text in texts.items() if right in text]
        assert texts[header].count(right) == 1
        texts[header] = texts[header].replace(right, wrong)
    name = f"attention_{NAMES[dtype]}.cu"
    lines = (KERNELS / name).read_text().splitlines(keepends=True)
    texts[name] = "".join(line for line in lines if "ATTENTION(" not in line or f", {size})" in line)
    folder = (
        cuda_host.compiled_kernels().parent / sha256(repr(sorted(texts.items())).encode()).hexdigest()[:20]
    )
    folder.mkdir(exist_ok=True)
    for file, text in texts.items():
        (folder / file).write_text(text)
    return folder / name


def shows(fault: str, dtype: torch.dtype) -> bool:
    parts = [unit(dtype, 16, fault), EMULATE / "run.cpp", EMULATE / "fibers.cpp"]
    host = Library(cuda_host.build(parts, shared=True, flags=("-O1", QUIET), name="faulty"))
    try:
        return not run(host, small(dtype))
    except (KernelFault, AssertionError):
        return True


@pytest.mark.parametrize("kind", ["address", "thread"])
def test_sanitizers_find_nothing(kind: str) -> None:
    host = cuda_host.sanitized(kind, sources=(unit(F32, 16), unit(BF16, 16)))
    for dtype in (F32, BF16):
        assert run(host, Case([(70, 3), (0, 1), (3, 2)], dtype, 1, 6, 16, window=60, page=8, chunk=48))


def test_nothing_shows_without_a_fault() -> None:
    assert all(run(cuda_host.library(), small(dtype)) for dtype in TOLERANCE)


@pytest.mark.parametrize("fault", [*SEEN, *(pytest.param(name, marks=pytest.mark.long) for name in SEEN_TOO)])
def test_a_fault_shows_in_the_outcome(fault: str) -> None:
    assert shows(fault, F32)


def test_values_that_are_not_transposed_show() -> None:
    assert shows("transposed values", BF16)


def test_reading_past_the_rows_is_out_of_bounds() -> None:
    host = cuda_host.sanitized("address", QUIET, sources=(unit(F32, 16, "end of a chunk"),))
    with pytest.raises(KernelFault, match="heap-buffer-overflow"):
        small(F32).run(host)


@pytest.mark.parametrize("fault", ["barrier of the ring", "barrier between scores"])
def test_a_dropped_barrier_is_a_race(fault: str) -> None:
    host = cuda_host.sanitized("thread", QUIET, sources=(unit(F32, 16, fault),))
    with pytest.raises(KernelFault, match="data race"):
        small(F32).run(host)
