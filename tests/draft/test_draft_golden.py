"""Target and draft against numbers of the reference implementation (tests/data/qwen3/*/golden)."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dspark.draft import DSparkDraftModel, load_draft
from dspark.target import TargetModel, load_target
from places import DATA, TINY

QWEN3 = DATA / "qwen3"
DRAFTS = {"draft-vanilla": TINY / "draft", "draft-rnn": QWEN3 / "draft-rnn"}
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return load_target(TINY / "target")


@pytest.fixture(scope="module", params=sorted(DRAFTS))
def case(request: pytest.FixtureRequest, target: TargetModel) -> tuple[DSparkDraftModel, dict[str, Tensor]]:
    golden = load_file(QWEN3 / request.param / "golden" / "golden.safetensors")
    return load_draft(DRAFTS[request.param], target=target), golden


def close(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and bool((found - expected).abs().max() < TOLERANCE)


@torch.inference_mode()
def test_the_target(target: TargetModel, case: tuple[DSparkDraftModel, dict[str, Tensor]]) -> None:
    draft, golden = case
    cache, prompt = target.new_cache(), golden["prompt_ids"]
    logits, taps = target(prompt, [(cache, len(prompt))], draft.config.target_layer_ids)
    assert close(logits, golden["target_logits"])
    assert taps is not None
    assert close(taps, golden["ctx_features"])
    cache.advance(len(prompt))
    block = torch.cat((golden["anchor_id"], golden["draft_tokens"]))
    logits, taps = target(block, [(cache, len(block))], draft.config.target_layer_ids)
    assert close(logits, golden["verify_logits"])
    kept = int(golden["accepted_round1"]) + 1
    assert taps is not None
    assert close(taps[:kept], golden["ctx_features_2"])


@torch.inference_mode()
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_two_rounds_of_the_draft(case: tuple[DSparkDraftModel, dict[str, Tensor]], chunk: int) -> None:
    draft, golden = case
    context = draft.new_context()
    for suffix in ("", "_2"):
        for taps in golden["ctx_features" + suffix].split(chunk):
            draft.extend([(context, len(taps))], taps)
        anchor = golden["anchor_id" + suffix]
        hidden, base = draft.block([int(anchor)], [context])
        assert close(hidden, golden["block_hidden" + suffix])
        assert close(base, golden["base_logits" + suffix])
        check_heads(draft, golden, suffix, anchor, hidden, base)


def check_heads(
    draft: DSparkDraftModel,
    golden: dict[str, Tensor],
    suffix: str,
    anchor: Tensor,
    hidden: Tensor,
    base: Tensor,
) -> None:
    """The greedy chain, where step k + 1 reads the token that step k drew, and every slot is used."""
    assert draft.markov_head is not None
    assert draft.confidence_head is not None
    previous, state, drawn, steps = anchor, None, [], []
    for slot in range(draft.config.gamma):
        bias, state = draft.markov_head.step(previous, hidden[slot : slot + 1], state)
        steps.append(base[slot : slot + 1] + bias)
        previous = steps[-1].argmax(-1)
        drawn.append(previous)
    assert torch.equal(torch.cat(drawn), golden["draft_tokens" + suffix])
    assert close(torch.cat(steps), golden["step_logits" + suffix])
    before = torch.cat((anchor, golden["draft_tokens" + suffix][:-1]))
    assert close(draft.markov_head.block(base, before, hidden), golden["step_logits" + suffix])
    logits = draft.confidence_head(hidden, before, draft.markov_head)
    assert close(logits, golden["confidence_logits" + suffix])
