"""A draft's heads as the Rust core reads them: CPU tensors, in place."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dspark.draft import DSparkDraftModel, GatedMarkovHead, RNNHead, VanillaMarkov


def heads_to_core(draft: DSparkDraftModel) -> dict[str, Any]:
    """`{"markov": {...}, "confidence": {...}, "vocabulary": [...]}`, each where the draft has one
    (`HeadTensors` in the core)."""
    heads: dict[str, Any] = {}
    if draft.markov_head is not None:
        heads["markov"] = _markov(draft.markov_head)
        if draft.markov_head.kind == "rnn":
            heads["markov"]["through_anchor"] = draft.config.state_rows > draft.config.gamma
    if draft.target_ids is not None:
        heads["vocabulary"] = draft.target_ids.tolist()
    if draft.confidence_head is not None:
        proj = draft.confidence_head.proj
        heads["confidence"] = {
            "weight": _host(proj.weight),
            "bias": _host(proj.bias),
            "with_markov": draft.confidence_head.with_markov,
        }
    return heads


def _markov(head: VanillaMarkov) -> dict[str, Any]:
    tensors: dict[str, Any] = {
        "kind": "vanilla",
        "w1": _host(head.markov_w1.weight),
        "w2": _host(head.markov_w2.weight),
    }
    if isinstance(head, GatedMarkovHead):
        tensors |= {
            "kind": "gated",
            "weight": _host(head.gate_proj.weight),
            "bias": _host(head.gate_proj.bias),
        }
    elif isinstance(head, RNNHead):
        tensors |= {
            "kind": "rnn",
            "weight": _host(head.joint_proj.weight),
            "bias": _host(head.joint_proj.bias),
        }
    return tensors


def _host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()
