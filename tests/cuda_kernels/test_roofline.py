"""What the kernels have to move, counted by hand beside `benchmarks/roofline.py`; the table."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from dspark.kernels import Choice
from places import ROOT

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(scope="module")
def kernels() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCHMARKS))  # as a program has its own folder
    yield importlib.import_module("kernels")
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def roofline() -> ModuleType:
    spec = importlib.util.spec_from_file_location("roofline", BENCHMARKS / "roofline.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["roofline"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_bytes_at_the_flagships_sizes(roofline: ModuleType) -> None:
    setting = roofline.Setting(requests=2, rows=8, kept=3, context=1000)
    found = {work.kernel: work for work in roofline.works(setting)}
    assert found["verify attention"].read == 2 * (2 * 1008 * 4 * 256 * 2 + 8 * 24 * 256 * 2)
    assert found["draft attention"].read == 2 * (2 * 1007 * 8 * 128 * 2 + 7 * 32 * 128 * 2)
    state, conv = 48 * 128 * 128 * 4, 3 * 10240 * 4
    assert found["delta rows"].read == 2 * (state + conv + 8 * (10240 + 6144 + 96) * 2)
    kept = 3 * (10240 * 2 + (2048 + 48 + 6144) * 4)
    assert found["delta commit"].read == 48 * (state + conv + kept)
    assert found["delta commit"].written == 48 * (state + conv) and found["delta commit"].launches == 2
    assert found["verify sampling"].read == (16 + 14) * 248_320 * 2
    assert found["Markov step"].read == 248_320 * 256 * 2 + 2 * 248_320 * 2
    assert found["verify attention"].intensity == pytest.approx(
        8 * 6, rel=0.06
    )  # rows times heads per key head
    assert found["delta rows"].intensity < 10  # bound by memory on any GPU served


def test_a_case_that_fails_is_reported_and_loses_no_other(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Until the device has failed: then nothing more is tried, and what was found is printed."""

    def fails() -> tuple[float, float]:
        raise RuntimeError("planted\nfault")

    made = [
        ("one", "good", lambda: (1e-6, 1e-5)),
        ("two", "raises", fails),
        ("three", "not a number", lambda: (float("nan"), 1.0)),
        ("four", "never reached", lambda: (0.0, 0.0)),
    ]
    left = [True, True, False]
    monkeypatch.setattr(kernels, "choose", lambda device: Choice(object()))
    monkeypatch.setattr(kernels, "cases", lambda choice, device: iter(made))
    monkeypatch.setattr(kernels, "works", lambda device: left.pop(0) if left else False)
    for json_wanted in (True, False):
        left[:] = [True, True, False]
        words = ["kernels.py", "--device", "cpu", *(["--json"] if json_wanted else [])]
        monkeypatch.setattr(sys, "argv", words)
        assert kernels.main() == 1
        said = capsys.readouterr().out
        assert "RuntimeError: planted fault" in said and "four" not in said
        if json_wanted:
            found = json.loads(said)["parity"]
            assert [case["kernel"] for case in found] == ["one", "two", "three"]
            assert [case["ok"] for case in found] == [True, False, False]


def test_the_table_needs_no_gpu() -> None:
    words = [sys.executable, str(BENCHMARKS / "kernels.py"), "--table", "--bandwidth", "2000"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = done.stdout.splitlines()
    assert len(rows) == 2 + 6 + 1 and "2000 GB/s" in rows[0] and rows[-1].startswith("| together")
