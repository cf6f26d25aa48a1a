"""One training step against the reference implementation's numbers (golden/training.safetensors)."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dspark.draft import DSparkDraftModel
from dspark.draft.packaging import read_draft_directory
from dspark.train.batch import Anchors, Batch
from dspark.train.distances import TeacherLaw
from dspark.train.forward import BlockOutputs, TrainingPass
from dspark.train.losses import Objective, Terms, loss_terms
from places import DATA, TINY

STEP = DATA / "qwen3" / "draft-vanilla" / "golden" / "training.safetensors"
DRAFT = TINY / "draft"
TOLERANCE = 1e-4
WIDTH = 7


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(STEP)


def trainable() -> DSparkDraftModel:
    """The embedded draft as it is trained: embeddings and head frozen."""
    config, _ = read_draft_directory(DRAFT)
    draft = DSparkDraftModel(config)
    draft.load_state_dict(load_file(DRAFT / "model.safetensors"))
    for part in (draft.embed_tokens, draft.lm_head):
        assert part is not None
        part.requires_grad_(False)
    return draft


def step(golden: dict[str, Tensor], **options: object) -> tuple[DSparkDraftModel, BlockOutputs, Terms]:
    draft = trainable()
    hidden = golden["target_last_hidden"]
    assert draft.lm_head is not None
    logits = hidden @ draft.lm_head.weight.T
    batch = Batch(
        golden["input_ids"],
        golden["loss_mask"].bool(),
        golden["ctx_features"],
        hidden,
        logits.logsumexp(-1),
    )
    anchors = Anchors(golden["anchor_positions"], golden["block_keep_mask"])
    training = TrainingPass(draft, **options)  # type: ignore[arg-type]
    [outputs] = training(batch, anchors, WIDTH, lambda outputs: outputs)
    law = TeacherLaw.of_logits(logits.flatten(0, 1), batch.normalisers.flatten())
    labels = outputs.labels
    return draft, outputs, loss_terms(outputs, law, labels.positions, labels.tokens, Objective())


def close(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and bool((found - expected).abs().max() < TOLERANCE)


@pytest.mark.parametrize("attention", ["products", "sdpa"])
def test_the_forward_pass(golden: dict[str, Tensor], attention: str) -> None:
    _, outputs, _ = step(golden, attention=attention)
    kept = golden["block_keep_mask"]
    labels = outputs.labels
    assert not kept.all()  # one block of the fixture is filling
    assert torch.equal(labels.tokens[labels.counted], golden["target_ids"][kept][labels.counted])
    assert torch.equal(labels.counted, golden["eval_mask"][kept])
    logits = torch.zeros(*kept.shape, *outputs.logits.shape[1:])
    logits[kept] = outputs.logits
    assert close(logits[:, :4], golden["draft_logits"])
    assert outputs.confidence is not None
    assert close(outputs.confidence, golden["confidence_logits"][kept])


def test_loss_terms_and_gradients(golden: dict[str, Tensor]) -> None:
    draft, _, terms = step(golden)
    for ours, theirs in (
        (terms.cross_entropy, "ce_loss_num"),
        (terms.said_weight, "ce_loss_den"),
        (terms.distance, "l1_loss_num"),
        (terms.weight, "l1_loss_den"),
        (terms.confidence, "confidence_loss_num"),
        (terms.weight, "confidence_loss_den"),
    ):
        assert float(ours.detach()) == pytest.approx(
            float(golden[f"term.{theirs}"]), rel=1e-5, abs=TOLERANCE
        ), theirs
    loss = terms.loss(Objective().factors(0.0), terms.weight, terms.said_weight)
    assert float(loss.detach()) == pytest.approx(float(golden["loss"]), abs=1e-5)
    loss.backward()
    norms = {name: p.grad.norm() for name, p in draft.named_parameters() if p.grad is not None}
    expected = {name[len("grad_norm.") :]: v for name, v in golden.items() if name.startswith("grad_norm.")}
    assert set(norms) == set(expected)
    for name, norm in norms.items():
        assert float(norm) == pytest.approx(float(expected[name]), rel=1e-4, abs=1e-6), name


def test_a_detached_confidence_loss_stays_out_of_the_backbone(golden: dict[str, Tensor]) -> None:
    draft, _, terms = step(golden, detach_confidence=True)
    terms.confidence.backward()
    reached = {name for name, p in draft.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    # The Markov feature is the head's own input, not the backbone's.
    assert reached == {
        "confidence_head.proj.weight",
        "confidence_head.proj.bias",
        "markov_head.markov_w1.weight",
    }
