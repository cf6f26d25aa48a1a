"""A draft's heads as the Rust core reads them: on the host, or for kernels on the draft's device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dspark.draft import DSparkDraftModel, GatedMarkovHead, RNNHead, VanillaMarkov


def heads_to_core(draft: DSparkDraftModel) -> dict[str, Any]:
    """`{"markov": {...}, "confidence": {...}, "vocabulary": [...]}` with CPU tensors, each entry only if the
    draft has it (`HeadTensors` in the core)."""
    heads = _heads(draft, _host)
    if draft.target_ids is not None:
        heads["vocabulary"] = draft.target_ids.tolist()
    return heads


def heads_to_device(draft: DSparkDraftModel, vocabulary: int) -> dict[str, Any]:
    """The same with tensors on the draft's device (`DeviceHeadTensors` in the core). `vocabulary` is the size
    of the target's; a reduced one becomes `{"tokens", "column"}`: the token of each column, and the column of
    each token or -1, as int32. All of it is ready when this returns."""
    heads = _heads(draft, _in_place)
    if draft.target_ids is not None:
        tokens = draft.target_ids
        column = torch.full((vocabulary,), -1, dtype=torch.int32, device=tokens.device)
        column[tokens] = torch.arange(len(tokens), dtype=torch.int32, device=tokens.device)
        heads["vocabulary"] = {"tokens": tokens.to(torch.int32).contiguous(), "column": column}
        if tokens.device.type == "cuda":  # they are read on the stream of another thread
            torch.cuda.synchronize(tokens.device)
    return heads


def _heads(draft: DSparkDraftModel, place: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    heads: dict[str, Any] = {}
    if draft.markov_head is not None:
        heads["markov"] = _markov(draft.markov_head, place)
        if draft.markov_head.kind == "rnn":
            heads["markov"]["through_anchor"] = draft.config.state_rows > draft.config.gamma
    if draft.confidence_head is not None:
        proj = draft.confidence_head.proj
        heads["confidence"] = {
            "weight": place(proj.weight),
            "bias": _host(proj.bias),
            "with_markov": draft.confidence_head.with_markov,
        }
    return heads


def _markov(head: VanillaMarkov, place: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    tensors: dict[str, Any] = {
        "kind": "vanilla",
        "w1": place(head.markov_w1.weight),
        "w2": place(head.markov_w2.weight),
    }
    if isinstance(head, GatedMarkovHead):
        tensors |= {
            "kind": "gated",
            "weight": place(head.gate_proj.weight),
            "bias": place(head.gate_proj.bias),
        }
    elif isinstance(head, RNNHead):
        tensors |= {
            "kind": "rnn",
            "weight": place(head.joint_proj.weight),
            "bias": place(head.joint_proj.bias),
        }
    return tensors


def _host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()


def _in_place(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous()
