"""The emulation of CUDA's threads: that it computes what CUDA would, and that it catches what it should."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cuda_host import EMULATE, KernelFault, Launcher, Library, Replay, build, fields, sanitized

ZOO = Path(__file__).parent / "emulator.cu"
Args = fields(input=ctypes.c_void_p, out=ctypes.c_void_p, mode=ctypes.c_int64)


@cache
def fibers(*flags: str) -> Library:
    parts = [ZOO, EMULATE / "run.cpp", EMULATE / "fibers.cpp"]
    return Library(build(parts, shared=True, flags=("-O2", *flags), name="emulator"))


def under(kind: str, *flags: str) -> Replay:
    return sanitized(kind, *flags, sources=(ZOO,))


def run(
    launcher: Launcher,
    entry: str,
    out: Tensor,
    *,
    mode: int = 0,
    block: int = 128,
    blocks: int = 1,
    shared: int = 0,
    given: Tensor | None = None,
) -> Tensor:
    given = out if given is None else given
    args = Args(given.data_ptr(), out.data_ptr(), mode)
    launcher.launch(entry, (blocks, 1, 1), block, args, [given, out], shared)
    return out


LAUNCHERS: dict[str, Callable[[], Launcher]] = {
    "fibers": fibers,
    "ucontext": lambda: fibers("-DEMULATE_UCONTEXT"),  # what processors other than x86-64 get
    "address": lambda: under("address"),
    "thread": lambda: under("thread"),
}


@pytest.fixture(params=LAUNCHERS)
def launcher(request: pytest.FixtureRequest) -> Launcher:
    return LAUNCHERS[request.param]()


def test_a_block_meets_at_its_barrier(launcher: Launcher) -> None:
    out = run(launcher, "reverse_block", torch.zeros(128, dtype=torch.int32))
    assert out.tolist() == list(range(127, -1, -1))


def test_a_dropped_barrier_is_a_wrong_number_and_a_race() -> None:
    out = run(fibers("-DDROP_BARRIER"), "reverse_block", torch.zeros(128, dtype=torch.int32))
    assert out.tolist() != list(range(127, -1, -1)) and -1 in out.tolist()  # what was not written yet
    with pytest.raises(KernelFault, match=r"data race[\s\S]*emulator\.cu"):
        run(under("thread", "-DDROP_BARRIER"), "reverse_block", torch.zeros(128, dtype=torch.int32))


@pytest.mark.parametrize(
    ("mode", "sentence"),
    [
        (0, r"threads of one block wait at different places: __syncthreads \(emulator\.cu:\d+\) and"),
        (
            1,
            r"127 of 128 threads of the block at __syncthreads \(emulator\.cu:\d+\).*1 threads have returned",
        ),
        (2, r"threads of one warp wait at different places"),
        (3, r"__shfl_xor_sync \(emulator\.cu:\d+\) names some lanes only"),
        (4, r"\d+ of 128 threads of the block at __syncthreads .*31 of 32 threads of warp 2"),
    ],
)
def test_what_would_hang_a_device_is_a_sentence(launcher: Launcher, mode: int, sentence: str) -> None:
    with pytest.raises(KernelFault, match=sentence):
        run(launcher, "wrong_meeting", torch.zeros(128, dtype=torch.int32), mode=mode)


def test_a_launch_after_a_failed_one_is_right() -> None:
    with pytest.raises(KernelFault):
        run(fibers(), "wrong_meeting", torch.zeros(128, dtype=torch.int32), mode=4)
    test_a_block_meets_at_its_barrier(fibers())


def test_shared_memory_is_poisoned_before_each_block(launcher: Launcher) -> None:
    out = run(launcher, "unwritten", torch.zeros(128), block=32, blocks=2, shared=128)
    assert out.isnan().all()


def test_the_address_sanitizer_sees_what_is_out_of_bounds() -> None:
    def at(mode: int) -> Tensor:
        out = torch.zeros(32, dtype=torch.int32)
        return run(under("address"), "bounds", out, mode=mode, block=32, shared=128)

    assert at(0).tolist() == [2 * i for i in range(32)]
    for mode in (1, 2, 3):
        with pytest.raises(KernelFault, match="heap-buffer-overflow"):
            at(mode)
    with pytest.raises(KernelFault, match="misaligned address"):
        at(4)
    with pytest.raises(KernelFault, match="signed integer overflow"):
        at(5)


def test_lanes_exchange_as_cuda_says(launcher: Launcher) -> None:
    out = run(launcher, "lanes", torch.zeros(15, 64, dtype=torch.int64), block=64)
    for warp, found in enumerate(out.view(15, 2, 32).unbind(1)):
        lane, one = torch.arange(32), torch.ones(32, dtype=torch.int64)
        value = lane + 100 * warp
        part = lane // 8 * 8
        sources = [
            3 * one,
            part + 3,
            lane ^ 5,
            torch.where(lane ^ 16 < part + 8, lane ^ 16, lane),  # a later group of lanes is not reached
            torch.where(lane + 4 < 32, lane + 4, lane),
            torch.where(lane + 4 < part + 8, lane + 4, lane),
            torch.where(lane >= 4, lane - 4, lane),
            torch.where(lane - part >= 4, lane - 4, lane),
        ]
        expected = [value[source] for source in sources]
        votes = sum(1 << i for i in range(0, 32, 3))
        expected += [votes * one, int(warp == 1) * one, int(warp == 0) * one]
        expected += [value.sum() * one, value.view(4, 8).sum(1).repeat_interleave(8)]
        expected += [value.max() * one, -value.view(8, 4).min(1).values.repeat_interleave(4)]
        assert torch.equal(found, torch.stack(expected))


def test_atomics_add_up(launcher: Launcher) -> None:
    out = torch.tensor([0, 0, 1 << 20, 0, 0], dtype=torch.int32)
    run(launcher, "atomics", out, blocks=3)
    count = 3 * 128
    assert out[:4].tolist() == [count * (count - 1) // 2, count - 1, 0, 0x7FFFFFFF]
    assert out.view(torch.float32)[4] == count / 2


def test_halves_are_rounded_as_torch_rounds_them() -> None:
    """Every float16 and bfloat16, what lies between two neighbours, and what is beyond the ends."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    f16, bf16 = every.view(torch.float16).float(), every.view(torch.bfloat16).float()
    ties = torch.cat([(x[1:].double() + x[:-1].double()).div(2).float() for x in (f16, bf16)])
    near = torch.cat([ties.nextafter(torch.full_like(ties, end)) for end in (-torch.inf, torch.inf)])
    x = torch.cat([f16, bf16, ties, near])
    x = torch.cat([x, x.new_zeros(-len(x) % 256)])
    out = torch.zeros(len(x) * 3, dtype=torch.float32)
    run(fibers(), "conversions", out, given=x, block=256, blocks=len(x) // 256)
    halves = out[: len(x)].view(torch.int16)
    for bits, wide, dtype in (
        (halves[: len(x)], out[len(x) : 2 * len(x)], torch.bfloat16),
        (halves[len(x) :], out[2 * len(x) :], torch.float16),
    ):
        expected = x.to(dtype)
        number = ~x.isnan()
        assert torch.equal(bits[number], expected.view(torch.int16)[number])
        assert torch.equal(wide[number], expected.float()[number]) and wide[~number].isnan().all()


@pytest.mark.parametrize(
    ("entry", "block", "size", "sentence"),
    [
        ("nobody", 128, 24, "there is no kernel nobody"),
        ("reverse_block", 128, 16, "takes 24 bytes of arguments, not 16"),
        ("reverse_block", 256, 24, "whole warps of up to 128 threads, not 256"),
        ("reverse_block", 48, 24, "whole warps of up to 128 threads, not 48"),
    ],
)
def test_a_launch_that_a_device_would_refuse(entry: str, block: int, size: int, sentence: str) -> None:
    short = type("Short", (ctypes.Structure,), {"_fields_": [("bytes", ctypes.c_char * size)]})
    with pytest.raises(KernelFault, match=sentence):
        fibers().launch(entry, (1, 1, 1), block, short(), [])
