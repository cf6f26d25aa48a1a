"""The kernels on this machine's processor: built by its C++ compiler against `cuda/emulate`, for tests.

`library()` runs entries in this process on CPU tensors. `sanitized("address")` and `sanitized("thread")` run
the same launch in a program of its own under that sanitizer, each tensor in an allocation of its exact size.
All raise `KernelFault` with what the emulation or the sanitizer said.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import pytest
from torch import Tensor

from places import ROOT

CUDA = ROOT / "cuda"
KERNELS, EMULATE = CUDA / "kernels", CUDA / "emulate"
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
FLAGS = ("-std=c++20", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-strict-aliasing")
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas")
THREADS = "-DEMULATE_THREADS"
SANITIZERS = {
    "address": ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
    "thread": ("-g", "-fsanitize=thread", THREADS),
}
Grid = tuple[int, int, int]


class KernelFault(Exception):
    """What the emulation or a sanitizer had to say about a launch."""


class Launcher(Protocol):
    """Something that runs a grid of `block` threads each. `tensors` are all the memory that the kernel
    reaches, directly or through addresses in other tensors."""

    def launch(
        self,
        entry: str,
        grid: Grid,
        block: int,
        args: ctypes.Structure,
        tensors: Sequence[Tensor],
        shared: int = 0,
    ) -> None: ...


@contextmanager
def stand_in(cache: Path, **variables: str) -> Iterator[Library]:
    """A driver whose device memory is the processor's, for decoders on the CPU that are made meanwhile; with
    compiled kernels in `cache`, and further environment variables."""
    made = library()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSPARK_CUDA_DRIVER", str(made.path))
        patch.setenv("DSPARK_KERNEL_CACHE", str(cache))
        patch.setenv("DSPARK_STANDIN_FAIL", f"none:0:{next(_count)}")  # counts begin anew
        for name, value in variables.items():
            patch.setenv(name, value)
        yield made


_count = count(1)


def compiled_kernels() -> Path:
    """A folder of compiled kernels that stays from run to run: their names say of which sources they are."""
    return _folder() / "compiled"


def needs_compiler() -> None:
    """Skips a test where there is no C++ compiler."""
    if COMPILER is None:
        pytest.skip("no C++ compiler: g++ or clang++, or name one in CXX")


def units() -> list[Path]:
    """The translation units of the kernels."""
    return sorted(KERNELS.glob("*.cu"))


def build(
    sources: Sequence[Path], *, shared: bool, flags: Sequence[str] = ("-O2",), name: str = "kernels"
) -> Path:
    """Compiles and links, each object and the whole once for the same sources and flags; the files stay in
    the temporary folder of this user. Raises `KernelFault` with what the compiler said."""
    needs_compiler()
    headers = sorted([*KERNELS.glob("*.cuh"), *EMULATE.glob("*.h")])
    common = b"".join(path.read_bytes() for path in headers)
    folder = _folder()

    def compiled(source: Path) -> Path:
        # What is defined for kernels (a planted fault) is no reason to compile the rest again.
        own = [f for f in flags if source.suffix == ".cu" or not f.startswith("-D") or "EMULATE" in f]
        words = (*FLAGS, *WARNINGS, *own, f"-I{KERNELS}", f"-I{EMULATE}")
        return _once(
            folder,
            f"{source.stem}.o",
            (common, source.read_bytes(), str(source)),
            (*words, "-c", "-x", "c++", str(source)),
        )

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1))) as pool:
        objects = list(pool.map(compiled, sources))
    link = (*FLAGS, *flags, *(["-shared"] if shared else []), *map(str, objects))
    return _once(folder, f"{name}.so" if shared else name, (str(objects),), link)


def _folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"dspark-cuda-host-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _once(folder: Path, name: str, parts: Sequence[bytes | str], words: Sequence[str]) -> Path:
    digest = hashlib.sha256(repr((COMPILER, words)).encode())
    for part in parts:
        digest.update(part if isinstance(part, bytes) else part.encode())
    made = folder / f"{digest.hexdigest()[:20]}-{name}"
    if made.exists():
        return made
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        fresh = Path(scratch) / name
        done = subprocess.run([str(COMPILER), *words, "-o", fresh], capture_output=True, text=True)
        if done.returncode != 0:
            raise KernelFault(done.stderr)
        fresh.replace(made)
    return made


class Library:
    """Entries in this process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self._library.emulate_error.restype = ctypes.c_char_p
        self._library.emulate_entries.restype = ctypes.c_char_p

    def calls(self, function: str) -> int:
        """How often a function of the stand-in was called since DSPARK_STANDIN_FAIL was last changed."""
        return int(self._library.standin_calls(function.encode()))

    def launches(self, entry: str) -> int:
        """How often an entry was launched through the stand-in driver."""
        return int(self._library.standin_launches(entry.encode()))

    def entries(self) -> list[str]:
        """Their names, sorted."""
        return bytes(self._library.emulate_entries()).decode().split()

    def launch(
        self,
        entry: str,
        grid: Grid,
        block: int,
        args: ctypes.Structure,
        tensors: Sequence[Tensor],
        shared: int = 0,
    ) -> None:
        """Runs a grid; see `Launcher`."""
        _check(tensors)
        sizes = (ctypes.c_uint * 3)(*grid)
        code = self._library.emulate_launch(
            entry.encode(), sizes, block, shared, ctypes.byref(args), ctypes.c_size_t(ctypes.sizeof(args))
        )
        if code != 0:
            raise KernelFault(self._library.emulate_error().decode())


class Replay:
    """Launches in a program built with a sanitizer."""

    def __init__(self, program: Path) -> None:
        self._program = program

    def launch(
        self,
        entry: str,
        grid: Grid,
        block: int,
        args: ctypes.Structure,
        tensors: Sequence[Tensor],
        shared: int = 0,
    ) -> None:
        """Runs a grid and brings back what the kernel wrote; see `Launcher`."""
        _check(tensors)
        raw = bytes(args)
        tensors = list({tensor.data_ptr(): tensor for tensor in sorted(tensors, key=_bytes)}.values())
        head = struct.pack("64s7q", entry.encode(), *grid, block, shared, len(raw), len(tensors))
        with tempfile.NamedTemporaryFile(prefix="dspark-launch-") as file:
            file.write(head + raw)
            places = []
            for tensor in tensors:
                file.write(struct.pack("2Q", tensor.data_ptr(), _bytes(tensor)))
                places.append(file.tell())
                file.write(ctypes.string_at(tensor.data_ptr(), _bytes(tensor)))
            file.flush()
            words = [str(self._program), file.name]
            done = subprocess.run(words, capture_output=True, text=True)
            if "unexpected memory mapping" in done.stderr:  # too random addresses for this thread sanitizer
                done = subprocess.run(["setarch", "-R", *words], capture_output=True, text=True)
            if done.returncode != 0:
                raise KernelFault(done.stderr)
            for place, tensor in zip(places, tensors, strict=True):
                file.seek(place)
                ctypes.memmove(tensor.data_ptr(), file.read(_bytes(tensor)), _bytes(tensor))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _check(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        assert tensor.is_cpu and tensor.is_contiguous(), "a kernel's memory is whole CPU tensors"


@cache
def library(*flags: str) -> Library:
    """All units, and the stand-in for the driver, as one library; `flags` for the compiler, such as `-D`."""
    parts = [EMULATE / "run.cpp", EMULATE / "fibers.cpp", EMULATE / "driver.cpp"]
    return Library(build([*units(), *parts], shared=True, flags=("-O2", *flags), name="libcuda-stand-in"))


@cache
def sanitized(kind: str, *flags: str, sources: tuple[Path, ...] = ()) -> Replay:
    """All units (or `sources`) under the "thread" sanitizer, or "address" with that for undefined
    behaviour."""
    backend = "threads.cpp" if kind == "thread" else "fibers.cpp"
    parts = [EMULATE / "run.cpp", EMULATE / backend, EMULATE / "replay.cpp"]
    how = ("-O1", *SANITIZERS[kind], *flags)
    return Replay(build([*(sources or units()), *parts], shared=False, flags=how, name=f"replay-{kind}"))


def fields(**values: Any) -> type[ctypes.Structure]:
    """A structure of arguments from its fields' types, in order: `fields(out=c_void_p, rows=c_int64)`."""
    return type("Args", (ctypes.Structure,), {"_fields_": list(values.items())})


if __name__ == "__main__":  # builds the stand-in and says where it is
    print(library().path, file=sys.stdout)
