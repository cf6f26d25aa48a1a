"""`inspect_checkpoint`: what it tells, that it reads next to nothing, and its warnings."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dspark.checkpoint import inspect_checkpoint
from dspark.draft import load_draft
from dspark.errors import CheckpointError
from dspark.target import load_target
from model_zoo import (
    draft_tensors,
    nested_config,
    target_config,
    target_tensors,
    write_checkpoint,
    write_target,
)
from places import ROOT

TINY = ROOT / "python" / "dspark" / "pretrained" / "tiny"


def test_the_embedded_pair() -> None:
    target, draft = inspect_checkpoint(TINY / "target"), inspect_checkpoint(TINY / "draft")
    assert json.loads(json.dumps([target, draft])) == [target, draft]
    assert (target["role"], target["architecture"], target["layers"]) == ("target", "Qwen3ForCausalLM", 6)
    assert target["parameters"] == 689_568
    assert (draft["role"], draft["packaging"], draft["taps"]) == ("draft", "flat", [0, 2, 4])
    assert draft["markov_head"] == {"type": "vanilla", "rank": 16}
    assert draft["confidence_head"] == {"present": True, "with_markov": True}
    assert (draft["gamma"], draft["own_embeddings"], draft["warnings"]) == (7, True, [])


def test_the_draft_of_smollm2() -> None:
    found = inspect_checkpoint(ROOT / "models" / "smollm2-draft")
    assert (found["packaging"], found["num_target_layers"], found["draft_vocab_size"]) == (
        "speculators",
        30,
        12288,
    )
    assert (found["own_embeddings"], found["own_output_head"]) == (False, False)
    assert found["dtypes"] == {"BF16": 16_213_505}
    assert (found["unused_tensors"], found["warnings"]) == ([], [])  # its map of tokens is used


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_norms_of_exactly_one_look_untrained(dtype: torch.dtype, tmp_path: Path) -> None:
    config = target_config("qwen3")
    tensors = {name: tensor.to(dtype) for name, tensor in target_tensors(config).items()}
    ones = {name: torch.ones_like(t) if "norm" in name else t for name, t in tensors.items()}
    path = write_checkpoint(tmp_path, config, ones)
    assert ["looks untrained" in warning for warning in inspect_checkpoint(path)["warnings"]] == [True]
    almost = dict(ones) | {"model.norm.weight": tensors["model.norm.weight"]}
    assert inspect_checkpoint(write_checkpoint(path, config, almost))["warnings"] == []


def test_tensors_that_nothing_uses_are_listed(tmp_path: Path) -> None:
    tensors = draft_tensors(own=False) | {"mtp.b": torch.zeros(2), "mtp.a": torch.zeros(2)}
    found = inspect_checkpoint(write_checkpoint(tmp_path, nested_config(), tensors))
    assert found["unused_tensors"] == ["mtp.a", "mtp.b"]
    assert found["warnings"] == ["2 tensors are not used: mtp.a, mtp.b"]


def test_the_count_of_parameters_is_that_of_the_model(tmp_path: Path) -> None:
    path = write_target(tmp_path / "target", "qwen2", tie_word_embeddings=True)
    counted = sum(
        tensor.numel() for tensor in target_tensors(target_config("qwen2", tie_word_embeddings=True)).values()
    )
    assert inspect_checkpoint(path)["parameters"] == counted
    assert inspect_checkpoint(path)["tied_embeddings"] is True


def test_what_cannot_be_loaded_cannot_be_inspected(tmp_path: Path) -> None:
    tensors = draft_tensors(own=False)
    tensors["layers.1.mlp.up_proj.weight"] = torch.zeros(39, 32)
    path = write_checkpoint(tmp_path, nested_config(), tensors)
    messages = []
    for read in (
        inspect_checkpoint,
        lambda p: load_draft(p, target=load_target(write_target(tmp_path / "t", "llama"))),
    ):
        with pytest.raises(
            CheckpointError, match=r"layers.1.mlp.up_proj.weight has the wrong shape"
        ) as caught:
            read(path)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_it_needs_no_torch_and_reads_no_weights(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from dspark.checkpoint import inspect_checkpoint\n"
        "for path in sys.argv[1:]: inspect_checkpoint(path)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script, TINY / "target", TINY / "draft"], check=True)
