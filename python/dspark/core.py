"""The decisions of dspark on their own, for those who have their own decoding loop.

Nothing here loads a model or imports torch. Logits may be numpy arrays or torch CPU tensors of float64,
float32 or float16, torch also bfloat16; they are read in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dspark import _core
from dspark._core import Calibration, CostTable, Noise, Uniforms, plan, threshold_prefix
from dspark.errors import NumericsError, RequestError
from dspark.sampling import SamplingParams

__all__ = [
    "Calibration",
    "CostTable",
    "Noise",
    "SamplingParams",
    "Uniforms",
    "accept",
    "accept_batch",
    "plan",
    "threshold_prefix",
]


def accept(
    target_logits: Any,
    draft_ids: Sequence[int],
    draft_logits: Any,
    rule: str,
    params: SamplingParams,
    noise: Noise | Uniforms,
    *,
    prompt_ids: Sequence[int] = (),
    output_ids: Sequence[int] = (),
) -> tuple[int, int]:
    """Applies an acceptance rule to one request's verify pass.

    `target_logits` is `[L+1, V]`: row k is the target's answer after `draft_ids[:k]`. `draft_logits` is
    `[L, V]`: the rows that the drafted tokens were drawn from, before `params` are applied (`None` for L
    = 0). `prompt_ids` and `output_ids` are what came before, for the penalties and `min_tokens`.
    Parameters that are `None` in `params` have no effect.

    Returns `(accepted, token)`: how many drafted tokens are kept, and the corrected or bonus token after
    them. Raises `RequestError` for shapes that do not match and `NumericsError` for a row from which nothing
    can be drawn. Rules: arXiv 2211.17192 (rejection), 2403.10444 (block), 2408.07978 (coupled).
    """
    [outcome] = accept_batch(
        target_logits,
        [draft_ids],
        draft_logits,
        rule,
        [params],
        [noise],
        prompt_ids=[prompt_ids],
        output_ids=[output_ids],
    )
    if isinstance(outcome, NumericsError):
        raise outcome
    return outcome


def accept_batch(
    target_logits: Any,
    draft_ids: Sequence[Sequence[int]],
    draft_logits: Any,
    rule: str,
    params: Sequence[SamplingParams],
    noise: Sequence[Noise | Uniforms],
    *,
    prompt_ids: Sequence[Sequence[int]] | None = None,
    output_ids: Sequence[Sequence[int]] | None = None,
) -> list[tuple[int, int] | NumericsError]:
    """`accept` for the packed rows of several requests, on all cores.

    Request i drafted `draft_ids[i]`, L_i tokens, and owns the next L_i + 1 rows of `target_logits` and
    the next L_i rows of `draft_logits`; all other arguments have one entry per request. For a request whose
    rows are bad, its `NumericsError` takes the place of its outcome; the others are not affected.
    """
    count = len(draft_ids)
    prompts, outputs = prompt_ids or [()] * count, output_ids or [()] * count
    for name, given in (
        ("params", params),
        ("noise", noise),
        ("prompt_ids", prompts),
        ("output_ids", outputs),
    ):
        if len(given) != count:
            raise RequestError(f"{name} has {len(given)} entries for {count} requests")
    try:
        return _core.accept_batch(
            target_logits,
            [list(ids) for ids in draft_ids],
            draft_logits,
            rule,
            [p.with_defaults({}) for p in params],
            list(noise),
            [(list(prompt), list(output)) for prompt, output in zip(prompts, outputs, strict=True)],
        )
    except OverflowError as error:
        raise RequestError("token ids must be whole numbers of at least 0") from error
