"""The output head of an adapted target, lent to a draft that has none of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dspark.errors import ConfigError

Finish = Callable[[Tensor], Tensor]


class LentHead:
    """Maps normed hidden states to logits the way the model itself does.

    Models treat the product of hidden states and head in different ways (soft-capping, a factor), and
    transformers has no name for them. So each way that the config mentions is compared with the model's own
    logits when the model is loaded; if none reproduces them, the head is not lent.
    """

    def __init__(self, head: nn.Module | None, finish: Finish | None, refusal: str | None) -> None:
        self._head = head
        self._finish = finish
        self.refusal = refusal

    @classmethod
    def find(cls, model: Any, text: Any, hidden: Tensor, logits: Tensor, tolerance: float) -> LentHead:
        """
        Args:
            hidden: `[rows, hidden]`, what the model reports as its last hidden states.
            logits: `[rows, vocabulary]`, the model's own for these.
            tolerance: largest difference that rounding explains, as a share of the largest logit.
        """
        name = type(model).__name__
        head = model.get_output_embeddings()
        if head is None:
            return cls(None, None, f"{name} names no output head (get_output_embeddings gives none)")
        if hidden.shape[-1] != text.hidden_size:
            width = f"{hidden.shape[-1]} dimensions, not {text.hidden_size}"
            return cls(None, None, f"{name}: its output head reads {width}")
        try:
            product = head(hidden)
        except (RuntimeError, TypeError) as error:
            return cls(None, None, f"{name}: its output head does not read its last hidden states ({error})")
        best: tuple[float, Finish | None] = (float("inf"), None)
        if product.shape == logits.shape:
            for finish in _finishes(text):
                apart = float((_through(product, finish) - logits).abs().max())
                if apart < best[0]:
                    best = apart, finish
        if best[0] > tolerance * float(logits.abs().max()):
            return cls(None, None, f"{name}: its logits are not its output head times its last hidden states")
        return cls(head, best[1], None)

    def is_matrix(self, weight: Tensor) -> bool:
        """Whether the head computes `hidden @ weight.T` and nothing else."""
        return (
            self._head is not None
            and self._finish is None
            and getattr(self._head, "bias", None) is None
            and getattr(self._head, "weight", None) is weight
        )

    def __call__(self, hidden: Tensor) -> Tensor:
        if self._head is None:
            raise ConfigError(f"this output head cannot be lent to a draft: {self.refusal}")
        return _through(self._head(hidden), self._finish)


def _through(product: Tensor, finish: Finish | None) -> Tensor:
    return product if finish is None else finish(product)


def _finishes(text: Any) -> Iterator[Finish | None]:
    """Ways to finish the product, the config's first: of two that fit, the one that it names is right."""
    cap, factor, divisor = (
        _number(text, name) for name in ("final_logit_softcapping", "logit_scale", "logits_scaling")
    )
    if cap is not None:
        yield lambda product: torch.tanh(product / cap) * cap
    if factor is not None:
        yield lambda product: product * factor
    if divisor is not None:
        yield lambda product: product / divisor
    yield None


def _number(text: Any, name: str) -> float | None:
    value = getattr(text, name, None)
    return float(value) if isinstance(value, int | float) and value not in (0, 1) else None
