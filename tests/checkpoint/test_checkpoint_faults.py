"""Faults reported of other loaders, on drafts: each either loads as it should or is refused by name.

What other files of tests cover already is not repeated: switches, heads and taps in test_draft_packaging,
slots and windows in test_draft_speculators, maps in test_draft_reduced, targets in test_checkpoint_files and
test_rope.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dspark.checkpoint import inspect_checkpoint
from dspark.devices import warn_if_slow
from dspark.draft import load_draft
from dspark.errors import CheckpointError
from dspark.pretrained import resolve
from dspark.target import load_target
from model_zoo import HIDDEN, draft_tensors, flat_config, nested_config, write_checkpoint, write_target
from packaging_zoo import reduced, speculators_config
from plain_draft import taps_of

PACKAGINGS: dict[str, tuple[Callable[..., dict[str, Any]], dict[str, Tensor]]] = {
    "flat": (flat_config, draft_tensors(own=True)),
    "nested": (lambda **changes: nested_config(None, **changes), draft_tensors(own=False)),
    "speculators": (
        lambda **changes: speculators_config(draft_vocab_size=16, **changes),
        reduced(draft_tensors(own=True)),
    ),
}
EACH = pytest.mark.parametrize("packaging", PACKAGINGS)
NAME = "layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_target(write_target(tmp_path_factory.mktemp("target"), "qwen3"))


def block(path: Path, target: Any, **options: Any) -> Tensor:
    draft = load_draft(path, target=target, **options)
    context, width = draft.new_context(), len(draft.config.target_layer_ids) * HIDDEN
    with torch.inference_mode():
        draft.extend([(context, 12)], taps_of(12, width=width))
        return draft.block([9], [context])[1]


def refused(path: Path, target: Any, *parts: str) -> None:
    """By both front doors, in the same words."""
    messages = []
    for read in (inspect_checkpoint, lambda path: load_draft(path, target=target)):
        with pytest.raises(CheckpointError) as caught:
            read(path)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    for part in parts:
        assert part in messages[0]


@EACH
def test_three_layers_and_five_taps(packaging: str, tmp_path: Path) -> None:
    deep = load_target(write_target(tmp_path / "target", "qwen3", num_hidden_layers=8))
    taps = [0, 1, 2, 3, 4]
    if packaging == "flat":
        config = flat_config(target_layer_ids=taps, num_hidden_layers=3, num_target_layers=8)
    elif packaging == "nested":
        config = nested_config({"target_layer_ids": taps}, num_hidden_layers=3, num_target_layers=8)
    else:
        config = speculators_config(aux_hidden_state_layer_ids=[tap + 1 for tap in taps], num_hidden_layers=3)
    tensors = draft_tensors(own=packaging == "flat", taps=5, layers=3)
    path = write_checkpoint(tmp_path / "draft", config, tensors)
    assert inspect_checkpoint(path)["taps"] == taps
    assert block(path, deep).isfinite().all()


@EACH
@pytest.mark.parametrize(
    ("rotation", "message"),
    [
        ({"rope_theta": 5e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}, None),
        ({"rope_theta": 5e4, "rope_parameters": None}, None),
        ({"rope_theta": None, "rope_parameters": None, "rope_scaling": {"rope_theta": 5e4}}, None),
        ({"rope_theta": 5e4, "rope_parameters": {"rope_type": "default", "rope_theta": None}}, None),
        ({"rope_theta": 5e4, "rope_parameters": {"rope_theta": 1e4}}, "rope_theta is 50000.0 but"),
        (
            {"rope_parameters": {"rope_theta": 5e4}, "rope_scaling": {"rope_theta": 1e4}},
            "rope_scaling.rope_theta",
        ),
        (
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "yarn", "factor": 2.0}},
            "rope_scaling.type is 'yarn'",
        ),
    ],
)
def test_the_rotation_in_several_places(
    packaging: str, rotation: dict[str, Any], message: str | None, target: Any, tmp_path: Path
) -> None:
    make, tensors = PACKAGINGS[packaging]
    body = {**rotation}
    if packaging == "speculators":
        config = make()
        config["transformer_layer_config"] |= body
        config["transformer_layer_config"] = {
            key: value for key, value in config["transformer_layer_config"].items() if value is not None
        }
    else:
        config = make(**body)
    path = write_checkpoint(tmp_path, config, tensors)
    if message is None:
        assert inspect_checkpoint(path)["rope"]["theta"] == 5e4
        assert block(path, target).isfinite().all()
    else:
        with pytest.raises(CheckpointError, match="they must be equal") as caught:
            load_draft(path, target=target)
        assert message in str(caught.value)


@EACH
def test_damaged_tensors(packaging: str, target: Any, tmp_path: Path) -> None:
    make, tensors = PACKAGINGS[packaging]
    cases: dict[str, tuple[Tensor | None, tuple[str, ...]]] = {
        "short": (torch.zeros(HIDDEN - 1, 40), ("wrong shape", "expected [32, 40]", "found [31, 40]")),
        "turned": (torch.zeros(40, HIDDEN), ("wrong shape", "found [40, 32]")),
        "flattened": (torch.zeros(40 * HIDDEN), ("wrong shape", "found [1280]")),
        "whole numbers": (torch.zeros(HIDDEN, 40, dtype=torch.int32), ("dtype I32", "quantised")),
        "eight bits": (torch.zeros(HIDDEN, 40).to(torch.float8_e4m3fn), ("dtype F8_E4M3", "quantised")),
        "missing": (None, ("is missing", "expected shape [32, 40]")),
    }
    for name, (tensor, parts) in cases.items():
        changed = {key: value for key, value in tensors.items() if key != NAME}
        if tensor is not None:
            changed[NAME] = tensor
        refused(write_checkpoint(tmp_path / name, make(), changed), target, NAME, *parts)


@EACH
def test_a_truncated_file(packaging: str, target: Any, tmp_path: Path) -> None:
    make, tensors = PACKAGINGS[packaging]
    path = write_checkpoint(tmp_path, make(), tensors)
    file = path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-3])
    refused(path, target, str(file), f"expected {len(content)} bytes", f"found {len(content) - 3}")


def write_sharded(path: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    names, places = sorted(tensors), {}
    for index, part in enumerate((names[::2], names[1::2])):
        shard = f"model-0000{index + 1}-of-00002.safetensors"
        save_file({name: tensors[name].contiguous() for name in part}, path / shard)
        places |= dict.fromkeys(part, shard)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return path


@EACH
def test_shards(packaging: str, target: Any, tmp_path: Path) -> None:
    make, tensors = PACKAGINGS[packaging]
    single = write_checkpoint(tmp_path / "single", make(), tensors)
    sharded = write_sharded(tmp_path / "sharded", make(), tensors)
    assert torch.equal(block(single, target), block(sharded, target))
    (sharded / "model-00002-of-00002.safetensors").unlink()
    refused(sharded, target, "index.json", "model-00002-of-00002.safetensors", "missing")


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_floating_dtype(packaging: str, dtype: torch.dtype, target: Any, tmp_path: Path) -> None:
    make, tensors = PACKAGINGS[packaging]
    lower = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    exact = {name: t.double() if t.is_floating_point() else t for name, t in lower.items()}
    path = write_checkpoint(tmp_path / "lower", make(), lower)
    expected = block(write_checkpoint(tmp_path / "exact", make(), exact), target)
    assert torch.equal(block(path, target, dtype=torch.float64), expected), "widening changes nothing"
    assert load_draft(path, target=target, dtype=dtype).dtype == dtype


@EACH
def test_a_draft_that_looks_untrained(
    packaging: str, target: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is loaded, and inspecting and loading say so."""
    make, tensors = PACKAGINGS[packaging]
    ones = {name: torch.ones_like(t) if "norm" in name else t for name, t in tensors.items()}
    for name, weights, found in (("ones", ones, True), ("trained", tensors, False)):
        path = write_checkpoint(tmp_path / name, make(), weights)
        assert any("looks untrained" in each for each in inspect_checkpoint(path)["warnings"]) == found
        caplog.clear()
        load_draft(path, target=target)
        assert [
            f"{path}: every normalisation weight is exactly 1.0: this checkpoint looks untrained"
        ] * found == [record.getMessage() for record in caplog.records]


@EACH
def test_progress_and_nothing_read_twice(packaging: str, target: Any, tmp_path: Path) -> None:
    make, tensors = PACKAGINGS[packaging]
    seen: list[tuple[int, int]] = []
    path = write_checkpoint(tmp_path, make(), tensors)
    load_draft(path, target=target, progress=lambda done, total: seen.append((done, total)))
    read = [tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")]
    assert len(seen) == len(read) and seen == sorted(seen)
    assert seen[-1] == (sum(8 * tensor.numel() for tensor in read),) * 2


def test_making_a_draft_imports_no_compiler() -> None:
    """Initialising modules on the meta device would: seconds at every start."""
    script = (
        "import sys\n"
        "from dspark.draft import load_draft\n"
        "from dspark.pretrained import resolve\n"
        "before = set(sys.modules)\n"
        "load_draft(resolve('tiny-draft', 'draft'), target=None)\n"
        "new = set(sys.modules) - before\n"
        "assert not [name for name in new if name.startswith(('sympy', 'torch._refs', 'torch._inductor'))]\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_dtype_that_this_cpu_multiplies_slowly_is_said(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def supported(answer: bool) -> None:
        for name in ("_is_mkldnn_bf16_supported", "_is_mkldnn_fp16_supported"):
            monkeypatch.setattr(torch.ops.mkldnn, name, lambda: answer, raising=False)

    tiny = resolve("tiny", "target")
    supported(True)
    warn_if_slow(str(tiny), dtype, torch.device("cpu"))
    supported(False)
    warn_if_slow(str(tiny), dtype, torch.device("cuda"))
    load_target(tiny, dtype=torch.float32)
    monkeypatch.setattr("dspark.target.load.serves", lambda *_: True)
    load_target(tiny, dtype=dtype)
    assert not caplog.messages
    monkeypatch.setattr("dspark.target.load.serves", lambda *_: False)
    load_target(tiny, dtype=dtype)
    name = str(dtype).removeprefix("torch.")
    assert caplog.messages == [f"{tiny}: this CPU multiplies {name} slowly: float32 is several times as fast"]
