"""`scripts/gpu_check.sh` as far as a machine without a GPU can run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cuda_host import compiled_kernels, stand_in
from places import ROOT

SCRIPT = ROOT / "scripts" / "gpu_check.sh"


def run(results: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, **variables}
    return subprocess.run([SCRIPT, results], capture_output=True, text=True, env=environment)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_and_exits_with_2(tmp_path: Path) -> None:
    done = run(tmp_path / "results.json")
    assert done.returncode == 2 and "there is no GPU" in done.stderr and done.stdout == ""
    assert not (tmp_path / "results.json").exists()


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_over_the_stand_in_every_part_runs(tmp_path: Path) -> None:
    with stand_in(compiled_kernels()):
        done = run(tmp_path / "results.json")
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads((tmp_path / "results.json").read_text())["parts"]
    done_parts = {name for name, part in parts.items() if part["ok"]}
    assert done_parts >= {"kernels load", "compiled", "parity and bandwidth", "traces and rounds"}
    assert all(part["ok"] is not False for part in parts.values())
    assert "| parity and bandwidth | good |" in done.stdout and "round of the embedded pair" in done.stdout
