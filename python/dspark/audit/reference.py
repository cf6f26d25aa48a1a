"""The target alone, without the engine: whole texts through the model, nothing kept between two calls."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.target.protocol import Target

ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-4}
"""Difference of two logits that float arithmetic explains, whatever their size."""

_UNITS = 4.0
"""The same for shorter formats, in eps of the dtype times the largest logit of the row: every layer rounds
a product over eight rows differently from one over a single row. Measured with SmolLM2 in bfloat16: 2.8 at
most over 160 rows."""


class Reference:
    """Logits of a target from plain full forward passes, each with a fresh cache."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def next_row(self, token_ids: Sequence[int]) -> Tensor:
        """Logits `[vocabulary]`, float64 on the CPU, after these tokens: one pass over all of them."""
        return self._pass(token_ids, "last")[0]

    def rows(self, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
        """Logits `[len(output), vocabulary]`, float64 on the CPU, that `output` is drawn from."""
        return self._pass([*prompt, *output], "all", len(prompt) - 1, -1)

    def bound(self, row: Tensor) -> float:
        """Gap between two logits of `row` that rounding explains.

        1e-4 in float32 and 1e-10 in float64; in shorter formats 4 eps max|logit|, eps the dtype's.
        """
        dtype = self._target.dtype
        if dtype in ROUNDING:
            return ROUNDING[dtype]
        return _UNITS * torch.finfo(dtype).eps * float(row.abs().max())

    def _pass(
        self, token_ids: Sequence[int], wanted: str, start: int | None = None, stop: int | None = None
    ) -> Tensor:
        ids = torch.tensor(token_ids, dtype=torch.int64, device=self._target.device)
        with torch.inference_mode():
            logits, _ = self._target(ids, [(self._target.new_cache(), len(token_ids))], logits=wanted)
            rows: Tensor = logits[start:stop].to("cpu", torch.float64)
        return rows


def law(rows: Tensor, temperature: float, top_p: float) -> Tensor:
    """Probabilities `[n, vocabulary]`, float64, of logits `[n, vocabulary]` after temperature and top-p.

    Written from the definition, independently of the core: the smallest set of likeliest tokens that holds
    `top_p`, renormalised.
    """
    probabilities = (rows / temperature).softmax(-1)
    if top_p >= 1:
        return probabilities
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    ahead = ordered.cumsum(-1) - ordered
    kept = torch.zeros_like(probabilities).scatter_(-1, order, ordered.masked_fill(ahead >= top_p, 0.0))
    return kept / kept.sum(-1, keepdim=True)
