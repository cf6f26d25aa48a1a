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
TOLERANCE = {F32: 4e-6, BF16: 2e-2}


def small(dtype: torch.dtype) -> Case:
    """Several tiles for each warp, so that stages of the ring are used again; two chunks; a window."""
    return Case([(250, 3), (3, 2)], dtype, 1, 6, 16, window=240, page=8, chunk=160)


def run(host: Launcher, case: Case) -> bool:
    """Whether outcome and caches are right."""
    case.run(host)
    case.check_caches()
    return case.largest_error() < TOLERANCE[case.dtype]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("kind", ["address", "thread"])
def test_sanitizers_find_nothing(kind: str, dtype: torch.dtype) -> None:
    unit = KERNELS / f"attention_{NAMES[dtype]}.cu"
    case = Case([(70, 3), (0, 1), (3, 2)], dtype, 1, 6, 16, window=60, page=8, chunk=48)
    assert run(cuda_host.sanitized(kind, sources=(unit,)), case)


# What to replace in the kernel's text, where it stands once, and by what.
FAULTS = {
    "barrier of the ring": ("kStages - 2>();\n      __syncthreads();", "kStages - 2>();"),
    "barrier before parts meet": ("    __syncthreads();\n    if (part == 1)", "    if (part == 1)"),
    "barrier between parts": ("    __syncthreads();\n    if (part == 0)", "    if (part == 0)"),
    "wait for a copy": ("await_copies<kStages - 2>", "await_copies<kStages>"),
    "stage taken too early": ("fetch(step + kStages - 1);", "fetch(step + kStages);"),
    "page": ("position >> args.page_shift;", "(position + 1) >> args.page_shift;"),
    "place within a page": (
        "(position - (page << args.page_shift))",
        "(position + 1 - (page << args.page_shift))",
    ),
    "later rows": ("causal ? own + 1 :", "causal ? own + 2 :"),
    "window": ("own + 1 - window", "own - window"),
    "what all rows see": ("of(rows - 1, rows, length)", "of(0, rows, length)"),
    "scale of earlier sums": ("    sum *= factor;\n", ""),
    "scale of earlier values": ("n % 4] *= factors[n % 4 / 2]", "n % 4] *= 1"),
    "scale in the merge": ("sums[p][i] * before + pack.at[i] * now", "sums[p][i] + pack.at[i]"),
    "head of a group": ("query % args.groups; }", "query / args.groups % args.groups; }"),
    "values as keys": ("cache + which * args.key_heads", "cache + 0 * args.key_heads"),
    "new rows kept": ("if (blockIdx.z == 0) keep_fresh();", ""),
}
OTHERS = {
    "transposed values": ("load_transposed(b,", "load_matrices(b,"),
    "end of a chunk": ("const bool wanted = position < stop;", "const bool wanted = true;"),
}


def planted(name: str, dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unit's smallest instances beside the header with the fault; the other headers are the real ones."""
    right, wrong = (FAULTS | OTHERS)[name]
    (header,) = [path for path in KERNELS.glob("*.cuh") if right in path.read_text()]
    text = header.read_text()
    assert text.count(right) == 1
    faulty = text.replace(right, wrong)
    folder = tmp_path_factory.getbasetemp() / sha256(faulty.encode()).hexdigest()[:16]
    folder.mkdir(exist_ok=True)
    for source in KERNELS.glob("*.cuh"):
        if source.name not in ("device.cuh", header.name):
            (folder / source.name).write_text(source.read_text())
    (folder / header.name).write_text(faulty)
    unit = folder / f"attention_{NAMES[dtype]}.cu"
    lines = (KERNELS / unit.name).read_text().splitlines()
    unit.write_text(
        "\n".join(line for line in lines if not line.startswith("ATTENTION") or ", 16)" in line) + "\n"
    )
    return unit


def shows(unit: Path, dtype: torch.dtype) -> bool:
    parts = [unit, EMULATE / "run.cpp", EMULATE / "fibers.cpp"]
    host = Library(cuda_host.build(parts, shared=True, flags=("-O1", "-Wno-unused"), name="faulty"))
    try:
        return not run(host, small(dtype))
    except (KernelFault, AssertionError):
        return True


def test_nothing_shows_without_a_fault() -> None:
    assert all(run(cuda_host.library(), small(dtype)) for dtype in TOLERANCE)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_shows_in_the_outcome(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert shows(planted(name, F32, tmp_path_factory), F32)


def test_values_that_are_not_transposed_show(tmp_path_factory: pytest.TempPathFactory) -> None:
    assert shows(planted("transposed values", BF16, tmp_path_factory), BF16)


def test_reading_past_the_rows_is_out_of_bounds(tmp_path_factory: pytest.TempPathFactory) -> None:
    unit = planted("end of a chunk", F32, tmp_path_factory)
    with pytest.raises(KernelFault, match="heap-buffer-overflow"):
        small(F32).run(cuda_host.sanitized("address", "-Wno-unused", sources=(unit,)))


@pytest.mark.parametrize(
    "name", ["barrier of the ring", "barrier before parts meet", "barrier between parts"]
)
def test_a_dropped_barrier_is_a_race(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    host = cuda_host.sanitized("thread", "-Wno-unused", sources=(planted(name, F32, tmp_path_factory),))
    with pytest.raises(KernelFault, match="data race"):
        small(F32).run(host)
