"""The hybrid fixture: the reference implementation's numbers and the target's own text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dspark import DSparkDecoder, SamplingParams
from dspark.checkpoint.describe import inspect_checkpoint
from dspark.draft import DSparkDraftModel, load_draft
from dspark.target import Target, load_target
from places import DATA

TARGET, DRAFT = DATA / "hybrid" / "target", DATA / "hybrid" / "draft-nested"
TRACE: list[dict[str, Any]] = json.loads((DRAFT / "golden" / "trace.json").read_text())
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(DRAFT / "golden" / "golden.safetensors")


@pytest.fixture(scope="module")
def pair() -> tuple[Target, DSparkDraftModel]:
    target = load_target(TARGET)
    return target, load_draft(DRAFT, target=target)


@pytest.fixture(scope="module")
def decoder() -> Iterator[DSparkDecoder]:
    with DSparkDecoder.from_pretrained(TARGET, DRAFT, device="cpu", policy="fixed") as decoder:
        yield decoder


def close(got: Tensor, expected: Tensor) -> bool:
    assert got.shape == expected.shape
    return float((got - expected).abs().max()) < TOLERANCE


@torch.inference_mode()
def test_two_rounds_of_numbers(pair: tuple[Target, DSparkDraftModel], golden: dict[str, Tensor]) -> None:
    """Prompt, block, verify pass, rollback, and a second block that goes on from what was kept."""
    target, draft = pair
    ids, taps = golden["prompt_ids"].long(), draft.config.target_layer_ids
    cache, context = target.new_cache(), draft.new_context()
    logits, tapped = target(ids, [(cache, len(ids))], taps)
    assert tapped is not None
    assert close(logits, golden["target_logits"]) and close(tapped, golden["ctx_features"])
    cache.advance(len(ids))
    draft.extend([(context, len(ids))], tapped)
    hidden, base = draft.block([int(golden["anchor_id"])], [context])
    assert close(hidden, golden["block_hidden"]) and close(base, golden["base_logits"])
    block = torch.cat((golden["anchor_id"], golden["draft_tokens"])).long()
    verified, tapped = target(block, [(cache, len(block))], taps)
    assert tapped is not None
    assert close(verified, golden["verify_logits"])
    kept = 1 + int(golden["accepted_round1"])
    assert 1 <= kept <= len(block)
    cache.advance(kept)
    assert close(tapped[:kept], golden["ctx_features_2"])
    draft.extend([(context, kept)], tapped[:kept])
    hidden, base = draft.block([int(golden["anchor_id_2"])], [context])
    assert close(hidden, golden["block_hidden_2"]) and close(base, golden["base_logits_2"])


@pytest.mark.parametrize("row", TRACE, ids=lambda row: repr(row["prompt"][:12]))
def test_the_text_is_the_targets_own_and_something_is_accepted(
    decoder: DSparkDecoder, row: dict[str, Any]
) -> None:
    params = SamplingParams(max_tokens=row["max_new_tokens"], temperature=0.0)
    result = decoder.generate(row["prompt_ids"], params)
    assert list(result.token_ids) == row["ar_output_ids"]
    assert result.acceptance_length is not None and result.acceptance_length > 1.0
    assert any(0 < r.accepted < r.verified for r in result.rounds)  # a rollback into the block


def test_one_batch_of_all_prompts(decoder: DSparkDecoder) -> None:
    params = [SamplingParams(max_tokens=row["max_new_tokens"], temperature=0.0) for row in TRACE]
    results = decoder.generate([row["prompt_ids"] for row in TRACE], params)
    assert [list(r.token_ids) for r in results] == [row["ar_output_ids"] for row in TRACE]


def test_plain_decoding_gives_the_same_text() -> None:
    with DSparkDecoder.from_pretrained(TARGET, device="cpu") as plain:
        for row in TRACE:
            params = SamplingParams(max_tokens=row["max_new_tokens"], temperature=0.0)
            assert list(plain.generate(row["prompt_ids"], params).token_ids) == row["ar_output_ids"]


def test_the_command_line_generates_and_inspects() -> None:
    row = TRACE[0]
    common = ["--target", str(TARGET), "--draft", str(DRAFT), "--device", "cpu", "--json"]
    ids = ",".join(map(str, row["prompt_ids"]))
    options = ["--token-ids", ids, "--max-tokens", "96", "--temperature", "0", "--policy", "fixed"]
    out = dspark("generate", *common, *options)
    assert out["token_ids"] == row["ar_output_ids"] and out["acceptance_length"] > 1
    described = dspark("inspect", str(TARGET), "--json")
    assert described == json.loads(json.dumps(inspect_checkpoint(TARGET)))


def dspark(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "dspark.cli", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_inspect_tells_what_it_is() -> None:
    described = inspect_checkpoint(TARGET)
    assert described["role"] == "target" and described["architecture"] == "Qwen3_5ForCausalLM"
    assert described["full_attention_layers"] == [2, 5] and described["linear_attention"]["layers"] == 4
    assert described["linear_attention"]["key_heads"] == 2
    assert described["linear_attention"]["value_heads"] == 4
    assert described["rotary_dim"] == 4 and described["head_dim"] == 16
    assert described["unused_tensors"] == [] and described["warnings"] == []
