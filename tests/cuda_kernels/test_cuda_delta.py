"""The gated delta rule's kernels, emulated, against float64: rows, commits, faults planted in the source."""

from __future__ import annotations

import ctypes
import hashlib
import tempfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cuda_host import EMULATE, KERNELS, KernelFault, Launcher, Library, build, library, sanitized
from delta_zoo import Pass, Sizes, expected, run_carry, run_rows

SIZES = {
    "fixture": Sizes(2, 2, 16, 16, 4),
    "odd": Sizes(2, 3, 8, 12, 4),
    "no-memory": Sizes(3, 1, 8, 33, 1),
    "two-taps": Sizes(1, 2, 33, 5, 2),
    "flagship-head": Sizes(1, 2, 128, 128, 4),
}
UNIT = KERNELS / "gated_delta_f32.cu"
ROUNDING = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}
"""Half a unit in the last place of what is written in that dtype."""

SINGLE = 2e-5
"""Of float32 sums, as a part of the largest number."""


@pytest.fixture(scope="module")
def host() -> Launcher:
    return library()


def close(got: Tensor, right: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    if not right.numel():
        return True
    allowed = right.abs() * ROUNDING[dtype] + SINGLE * right.abs().max()
    return bool(((got.double() - right).abs() <= allowed).all())


def check_rows(data: Pass) -> None:
    for layer in range(data.layers):
        for request, (first, count) in enumerate(zip(data.firsts, data.counts, strict=True)):
            right = expected(data, layer, request)
            assert close(data.out[layer, first : first + count], right.out, data.dtype), (layer, request)


def check_states(data: Pass, right: list[tuple[Tensor, Tensor]], request: int) -> None:
    for layer, (state, conv) in enumerate(right):
        assert close(data.states[request][layer], state), layer
        assert torch.equal(data.convs[request][layer].double(), conv), layer  # moved, not computed


def after(data: Pass, request: int, kept: int) -> list[tuple[Tensor, Tensor]]:
    """What the states of every layer should be when so many rows have been kept."""
    each = [expected(data, layer, request) for layer in range(data.layers)]
    return [(right.states[kept], right.convs[kept]) for right in each]


@pytest.mark.parametrize("counts", [(1,), (7,), (8,), (16,), (0, 3, 0, 8), (16, 1, 0)], ids=str)
@pytest.mark.parametrize("name", SIZES)
def test_rows_are_those_of_the_rule(host: Launcher, name: str, counts: tuple[int, ...]) -> None:
    data = Pass(SIZES[name], counts, seed=len(counts))
    before = [(state.clone(), conv.clone()) for state, conv in zip(data.states, data.convs, strict=True)]
    run_rows(host, data)
    check_rows(data)
    for (state, conv), new_state, new_conv in zip(before, data.states, data.convs, strict=True):
        assert torch.equal(state, new_state) and torch.equal(conv, new_conv)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_activations_in_16_bits(host: Launcher, dtype: torch.dtype) -> None:
    data = Pass(SIZES["odd"], (5, 8), dtype)
    run_rows(host, data)
    check_rows(data)
    right = after(data, 1, 6)
    run_carry(host, data, 1, 6)
    check_states(data, right, 1)


def test_a_norm_whose_weight_the_output_product_has(host: Launcher) -> None:
    data = Pass(SIZES["fixture"], (2,), weighted=False)
    run_rows(host, data)
    check_rows(data)


@pytest.mark.parametrize("name", ["fixture", "odd", "no-memory", "two-taps"])
@pytest.mark.parametrize("count", [1, 4, 8, 16])
def test_any_number_of_rows_may_be_kept(host: Launcher, name: str, count: int) -> None:
    """And the others of the batch, with their states, stay out of it."""
    for kept in range(1, count + 1) if count <= 8 else (1, 9, 15, 16):
        data = Pass(SIZES[name], (2, count, 1), seed=kept)
        run_rows(host, data)
        right = after(data, 1, kept)
        others = [data.states[0].clone(), data.states[2].clone()]
        run_carry(host, data, 1, kept)
        check_states(data, right, 1)
        assert torch.equal(others[0], data.states[0]) and torch.equal(others[1], data.states[2])


def test_the_flagships_head_is_carried(host: Launcher) -> None:
    data = Pass(SIZES["flagship-head"], (8,), torch.bfloat16)
    run_rows(host, data)
    right = after(data, 0, 5)
    run_carry(host, data, 0, 5)
    check_states(data, right, 0)


def test_many_rounds_drift_nowhere(host: Launcher) -> None:
    """The kept rows of every round, one after the other, give the same states in float64."""
    data = Pass(SIZES["odd"], (8,), layers=1)
    state, conv = data.states[0].double(), data.convs[0].double()
    for number in range(24):
        fresh = Pass(data.sizes, (8,), layers=1, seed=100 + number)
        fresh.weights = data.weights
        fresh.states, fresh.convs = [state], [conv]  # float64: what the reference goes on from
        kept = number % 9
        right = expected(fresh, 0, 0)
        state, conv = right.states[kept].unsqueeze(0), right.convs[kept].unsqueeze(0)
        fresh.states, fresh.convs = data.states, data.convs
        run_rows(host, fresh)
        if kept:
            run_carry(host, fresh, 0, kept)
    assert close(data.states[0], state) and torch.equal(data.convs[0].double(), conv)


def test_a_batch_changes_no_bit_of_a_request(host: Launcher) -> None:
    alone, batch = Pass(SIZES["odd"], (7,)), Pass(SIZES["odd"], (3, 7, 16))
    first = batch.firsts[1]
    batch.weights = alone.weights
    batch.states[1], batch.convs[1] = alone.states[0], alone.convs[0]
    batch.mixed[:, first : first + 7] = alone.mixed
    run_rows(host, alone)
    run_rows(host, batch)
    assert torch.equal(alone.out, batch.out[:, first : first + 7])
    assert torch.equal(alone.updates, batch.updates[:, first : first + 7])


def test_a_nan_stays_with_its_request_and_with_later_rows(host: Launcher) -> None:
    data, clean = (Pass(SIZES["fixture"], (3, 6, 2)) for _ in range(2))
    data.states[0].fill_(float("nan"))
    data.mixed[:, data.firsts[1] + 4] = float("nan")
    run_rows(host, data)
    run_rows(host, clean)
    assert data.out[:, :3].isnan().all() and data.out[:, 7].isnan().all()
    for rows in (slice(3, 7), slice(9, 11)):
        assert torch.equal(data.out[:, rows], clean.out[:, rows])
    right = after(clean, 1, 4)
    run_carry(host, data, 1, 4)
    check_states(data, right, 1)


RACE = "no barrier between the commit's weights and keys"
"""No value shows it where threads run in their order: the thread sanitizer does."""

FAULTS: dict[str, tuple[str, str, str]] = {
    "no barrier behind the convolution": (
        "delta_rows.cuh",
        "  gates<T, Rows>(args, block, shared);\n  __syncthreads();",
        "  gates<T, Rows>(args, block, shared);\n  if (!PLANTED) __syncthreads();",
    ),
    "no barrier before the system": (
        "delta_rows.cuh",
        "  decay_scores<Rows>(shared, args.sizes.value_dim);\n  __syncthreads();",
        "  decay_scores<Rows>(shared, args.sizes.value_dim);\n  if (!PLANTED) __syncthreads();",
    ),
    RACE: (
        "delta_carry.cuh",
        "  __syncthreads();\n  const float* keys",
        "  if (!PLANTED) __syncthreads();\n  const float* keys",
    ),
    "no barrier behind the commit's keys": (
        "delta_carry.cuh",
        "  __syncthreads();\n  float* state",
        "  if (!PLANTED) __syncthreads();\n  float* state",
    ),
    "the state is written before the commit": (
        "delta_rows.cuh",
        "  solve<T, Rows>(args, block, shared);",
        "  if (PLANTED) *const_cast<float*>(block.state) += 1.0f;\n  solve<T, Rows>(args, block, shared);",
    ),
    "one row more is kept": (
        "gated_delta_entries.cuh",
        "    gated_delta::run_carry<T>(args); \\",
        "    auto more = args; more.count += PLANTED; gated_delta::run_carry<T>(more); \\",
    ),
    "one row more in the convolution": (
        "delta_carry.cuh",
        "const int64_t at = args.count + j;",
        "const int64_t at = args.count + j + PLANTED;",
    ),
    "a row does not see itself": (
        "delta_rows.cuh",
        "*queries = s <= t ?",
        "*queries = s <= t - PLANTED ?",
    ),
    "a neighbour's head": (
        "gated_delta.cuh",
        "head.value % sizes.groups * sizes.value_dim;",
        "(head.value + PLANTED) % sizes.groups * sizes.value_dim;",
    ),
    "another layer's convolution": (
        "delta_inputs.cuh",
        "int64_t(args.layer) * (sizes.taps - 1)",
        "int64_t(args.layer * !PLANTED) * (sizes.taps - 1)",
    ),
}
"""File, what stands there, what a fault makes of it: each is tried, and found."""


def planted() -> Path:
    """The float32 unit as one file with all faults in it, of which `plant` chooses one; -1 is none."""
    headers = ["gated_delta", "delta_inputs", "delta_rows", "delta_carry", "gated_delta_entries"]
    text = {f"{name}.cuh": (KERNELS / f"{name}.cuh").read_text() for name in headers}
    for number, (file, right, wrong) in enumerate(FAULTS.values()):
        assert text[file].count(right) == 1, (file, right)
        text[file] = text[file].replace(right, wrong.replace("PLANTED", f"(planted == {number})"))
    lines = "\n".join([*text.values(), UNIT.read_text()]).splitlines()
    kept = [line for line in lines if not line.startswith(("#pragma once", '#include "'))]
    source = "\n".join(['#include "device.cuh"', PLANT, *kept, ""])
    path = Path(tempfile.gettempdir()) / f"dspark-delta-{hashlib.sha256(source.encode()).hexdigest()[:16]}.cu"
    path.write_text(source)
    return path


PLANT = """
#include <cstdlib>
static int planted = std::getenv("DSPARK_TEST_FAULT") ? std::atoi(std::getenv("DSPARK_TEST_FAULT")) : -1;
extern "C" void plant(int fault);
void plant(int fault) { planted = fault; }
"""


@pytest.fixture(scope="module")
def faulty() -> Library:
    parts = [EMULATE / "run.cpp", EMULATE / "fibers.cpp"]
    return Library(build([planted(), *parts], shared=True, flags=("-O1",), name="planted-delta"))


def plant(library: Library, fault: int) -> None:
    ctypes.CDLL(str(library.path)).plant(fault)


def round_of_a_batch(host: Launcher, data: Pass) -> None:
    """Rows and the commit of a request in the middle, with everything looked at."""
    before = [state.clone() for state in data.states]
    run_rows(host, data)
    check_rows(data)
    assert all(torch.equal(old, new) for old, new in zip(before, data.states, strict=True))
    kept = data.counts[1] - 1
    right = after(data, 1, kept)
    run_carry(host, data, 1, kept)
    check_states(data, right, 1)


def test_without_a_fault_nothing_is_found(faulty: Library) -> None:
    plant(faulty, -1)
    round_of_a_batch(faulty, Pass(SIZES["odd"], (2, 3, 1)))


@pytest.mark.parametrize("fault", [name for name in FAULTS if name != RACE])
def test_a_planted_fault_is_found(faulty: Library, fault: str) -> None:
    plant(faulty, list(FAULTS).index(fault))
    with pytest.raises((AssertionError, KernelFault)):
        round_of_a_batch(faulty, Pass(SIZES["odd"], (2, 3, 1)))


def test_the_sanitizers_of_addresses_and_undefined_behaviour_are_silent() -> None:
    round_of_a_batch(sanitized("address", sources=(UNIT,)), Pass(SIZES["two-taps"], (0, 3, 2)))


def test_the_thread_sanitizer_is_silent_unless_a_barrier_is_dropped(
    host: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = sanitized("thread", sources=(planted(),))
    round_of_a_batch(threads, Pass(SIZES["two-taps"], (0, 3, 1), layers=1))
    monkeypatch.setenv("DSPARK_TEST_FAULT", str(list(FAULTS).index(RACE)))
    data = Pass(SIZES["two-taps"], (3,), layers=1)
    run_rows(host, data)
    with pytest.raises(KernelFault, match="data race"):
        run_carry(threads, data, 0, 2)
