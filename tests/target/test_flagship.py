"""The published flagship without its weights: sizes to the last parameter, and a random draft of its full
size."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

import flagship
from dspark.checkpoint import inspect_checkpoint
from dspark.draft import DSparkDraftModel
from dspark.draft.packaging import read_draft_directory

REVISIONS = ("v1", "v2")


@pytest.mark.parametrize("revision", REVISIONS)
def test_parameters_names_and_shapes(revision: str, tmp_path: Path) -> None:
    facts = flagship.FACTS[revision]
    path = flagship.write(tmp_path, revision)  # a sparse file: no disk is used
    config, _ = read_draft_directory(path)
    with torch.device("meta"):
        model = DSparkDraftModel(config)
    parameters = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert sum(parameter.numel() for parameter in model.parameters()) == facts["parameters"]
    assert parameters == flagship.shapes(revision)
    found = inspect_checkpoint(path)
    assert (found["parameters"], found["packaging"]) == (facts["parameters"], "nested")
    assert (found["own_embeddings"], found["own_output_head"]) == (False, False)
    assert (found["gamma"], found["drops_anchor_slot"], found["unused_tensors"]) == (7, False, [])
    assert found["rope"]["kind"] == "yarn" and found["rope"]["factor"] == 32


def test_the_second_has_the_tensors_that_are_listed(tmp_path: Path) -> None:
    found = inspect_checkpoint(flagship.write(tmp_path, "v2"))
    assert found["tensors"] == flagship.FACTS["v2"]["tensors"] == len(flagship.shapes("v2")) == 62
    assert (found["block_size"], found["training_block_size"]) == (7, 16)


def test_the_stand_in_is_a_target_to_a_draft(tmp_path: Path) -> None:
    config, _ = read_draft_directory(flagship.write(tmp_path, "v2"))
    target = flagship.stand_in()
    target.device = torch.device("meta")
    with target.device:
        draft = DSparkDraftModel(config)
    assert draft.bind(target) is draft


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_random_draft_of_full_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Peak memory of loading at most 1.1 times the weights, with progress; then one block on the CPU."""
    weights = 2 * flagship.FACTS["v2"]["parameters"]
    if shutil.disk_usage(tmp_path).free < 1.3 * weights:
        pytest.skip(f"{tmp_path} has no room for {weights / 1e9:.1f} GB")
    noise = (torch.randn(1 << 23) * 0.02).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    ones = torch.ones(1 << 13, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()

    def pieces(name: str, size: int) -> Iterable[bytes]:
        source = ones if "norm" in name else noise
        while size:
            yield source[: min(size, len(source))]
            size -= min(size, len(source))

    try:
        flagship.write(tmp_path, "v2", pieces)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, flagship.__file__, str(tmp_path)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    finally:
        (tmp_path / "model.safetensors").unlink(missing_ok=True)
    found = json.loads(done.stdout)
    with capsys.disabled():
        print(
            f"\n{found['weights'] / 1e9:.2f} GB in {found['seconds']:.1f} s, peak "
            f"{found['peak'] / found['weights']:.3f} times the weights; one block "
            f"{found['block_seconds']:.2f} s"
        )
    assert found["weights"] == weights
    assert found["peak"] <= 1.1 * weights
    assert found["steps"] == 62 and found["complete"] and found["packed"] and found["finite"]
    assert (found["hidden"], found["base"]) == ([7, 5120], [7, 248320])
