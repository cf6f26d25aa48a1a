"""Every kernel for every architecture by torch's NVRTC: no spills, registers within budgets; the cache."""

from __future__ import annotations

import json
import re
import tomllib
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from os import cpu_count
from pathlib import Path
from typing import Any

import pytest
import torch

from commandline import run
from cuda_host import CUDA, KERNELS, compiled_kernels, library
from dspark import _core
from dspark.cli.kernels import TESTED
from dspark.errors import KernelError
from dspark.kernels import find_nvrtc

UNITS = dict(_core.kernel_units())


@cache
def nvrtc() -> str:
    try:
        return find_nvrtc()
    except KernelError as error:
        pytest.skip(str(error))


@cache
def budgets() -> dict[str, Any]:
    return tomllib.loads((CUDA / "budgets.toml").read_text())


@pytest.fixture(scope="module")
def compiled() -> dict[tuple[str, str], list[dict[str, Any]]]:
    """What every kernel uses, by unit and architecture; compiled on all cores, and kept for the next run."""
    path, cores = nvrtc(), ThreadPoolExecutor(cpu_count() or 1)
    with cores:
        jobs = {
            (unit, arch): cores.submit(_core.compile_kernels, path, str(compiled_kernels()), unit, arch)
            for unit in UNITS
            for arch in TESTED
        }
    return {job: found.result()[1] for job, found in jobs.items()}


@pytest.mark.parametrize("architecture", TESTED)
@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_compiles_without_spills_and_within_its_registers(
    compiled: dict[tuple[str, str], list[dict[str, Any]]], unit: str, architecture: str
) -> None:
    found = compiled[unit, architecture]
    assert sorted(used["entry"] for used in found) == sorted(UNITS[unit])
    if torch.version.cuda != budgets()["nvrtc"]:
        return  # another compiler, which allocates registers differently
    for used in found:
        name = used["entry"]
        assert used["spills"] == 0, f"{name} spills {used['spills']} bytes on {architecture}"
        budget = budgets()["registers"][name][architecture]
        assert used["registers"] <= budget, (
            f"{name} uses {used['registers']} registers on {architecture}, its budget is {budget}: "
            "python scripts/kernel_budgets.py writes new ones"
        )


def test_budgets_are_those_of_the_kernels_that_there_are() -> None:
    registers = budgets()["registers"]
    assert sorted(registers) == sorted(name for entries in UNITS.values() for name in entries)
    assert all(sorted(budget) == sorted(TESTED) for budget in registers.values())


def test_the_host_library_has_the_same_kernels() -> None:
    assert library().entries() == sorted(name for entries in UNITS.values() for name in entries)


def test_no_lambda_is_generic() -> None:
    """NVRTC before 13.2 takes the call operator of one for a host function."""
    generic = re.compile(r"\]\s*\([^)]*\bauto\b")
    assert generic.search("const auto f = [&](int r, auto x) {") and not generic.search(
        "auto f = [&](int r) {"
    )
    found = [path.name for path in sorted(KERNELS.iterdir()) if generic.search(path.read_text())]
    assert not found, f"generic lambdas in {found}"


def compile_probe(folder: Path | None, architecture: str = "sm_80") -> tuple[bool, list[dict[str, Any]]]:
    return _core.compile_kernels(nvrtc(), None if folder is None else str(folder), "probe", architecture)


def test_what_was_compiled_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "yet" / "there"
    kept, first = compile_probe(folder)
    assert not kept and compile_probe(folder) == (True, first)
    (file,) = folder.iterdir()
    assert file.name.startswith("probe-sm_80-") and file.suffix == ".cubin"
    assert not compile_probe(folder, "sm_90a")[0] and len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("damage", ["cut", "empty", "changed", "another file"])
def test_a_damaged_file_is_compiled_again(damage: str, tmp_path: Path) -> None:
    _, first = compile_probe(tmp_path)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    middle = len(whole) // 2
    changed = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    file.write_bytes({"cut": whole[:middle], "empty": b"", "changed": changed}.get(damage, b"something else"))
    assert compile_probe(tmp_path) == (False, first)
    assert file.read_bytes() == whole and compile_probe(tmp_path) == (True, first)


def test_a_folder_that_cannot_be_written_is_no_reason_to_stop(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for folder in (tmp_path / "file" / "folder", None):
        assert not compile_probe(folder)[0] and not compile_probe(folder)[0]


def test_many_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: compile_probe(tmp_path)[1], range(8)))
    assert all(one == found[0] for one in found)
    assert len(list(tmp_path.iterdir())) == 1 and compile_probe(tmp_path)[0]


@pytest.mark.parametrize(
    ("unit", "architecture", "sentence"),
    [
        ("nobody", "sm_80", 'no unit of kernels called "nobody"'),
        ("probe", "sm_70", "an architecture must be sm_80 or newer, such as sm_90a"),
        ("probe", "sm_810", "does not support sm_810"),
    ],
)
def test_what_cannot_be_compiled(unit: str, architecture: str, sentence: str) -> None:
    with pytest.raises(KernelError, match=sentence):
        _core.compile_kernels(nvrtc(), None, unit, architecture)


def test_the_command_lists_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_KERNEL_CACHE", str(compiled_kernels()))
    nvrtc()
    code, out, _ = run("kernels", "--arch", "sm_80", "sm_90a", "--json")
    found = json.loads(out)
    assert code == 0 and Path(found["nvrtc"]).samefile(nvrtc())
    entries = [(one["entry"], one["architecture"]) for one in found["kernels"]]
    assert sorted(entries) == sorted(
        (name, arch) for arch in ("sm_80", "sm_90a") for names in UNITS.values() for name in names
    )
    assert {"unit", "registers", "spills", "stack", "shared", "kept"} <= found["kernels"][0].keys()
    code, out, err = run("kernels", "--arch", "sm_80")
    assert code == 0 and out.splitlines()[0].split()[:3] == ["kernel", "architecture", "registers"]
    assert any(line.split()[:2] == ["probe", "sm_80"] for line in out.splitlines())
    assert str(compiled_kernels()) in err
    code, out, err = run("kernels", "--arch", "sm_60", "--json")
    assert code == 2 and json.loads(out)["error"]["type"] == "KernelError" and "sm_60" in err
