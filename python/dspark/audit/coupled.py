"""Checks what `coupled` promises beyond a distribution: text is a function of seed, position and target.

Every token can be computed from the reference's logits and the noise of its position, without a draft.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dspark.audit.checks import CoupledCheck
from dspark.audit.reference import Reference
from dspark.core import Noise, accept
from dspark.progress import Progress
from dspark.result import GenerationResult
from dspark.sampling import SamplingParams


def check_coupled(
    name: str,
    results: Sequence[GenerationResult],
    samples: int,
    params: SamplingParams,
    reference: Reference,
    progress: Progress,
) -> CoupledCheck:
    """Compares results of the rule `coupled`, `samples` in a row for each prompt, with the reference.

    A difference counts as rounding if the engine's token wins once its logit is raised by the bound for
    rounding.
    """
    equal, rounding, beyond = 0, 0, []
    for number, result in enumerate(results):
        rows = reference.rows(result.prompt_token_ids, result.token_ids)
        for index, (token, row) in enumerate(zip(result.token_ids, rows, strict=True)):
            # The noise of a token is that of its position, one after its anchor's.
            anchor = len(result.prompt_token_ids) + index - 1
            noise = Noise(result.seed, anchor, number % samples)
            if _token(row, params, noise) == token:
                equal += 1
                continue
            raised = row.clone()
            raised[token] += reference.bound(row)
            if _token(raised, params, noise) == token:
                rounding += 1
            else:
                beyond.append((number, index))
        progress(f"reference, {name}", number + 1, len(results))
    return CoupledCheck(name, equal, rounding, tuple(beyond))


def _token(row: Tensor, params: SamplingParams, noise: Noise) -> int:
    return accept(row[None], [], None, "coupled", params, noise)[1]
