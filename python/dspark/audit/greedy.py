"""Temperature 0: every token of the engine against the argmax of a plain forward pass."""

from __future__ import annotations

from collections.abc import Sequence

from dspark.audit.checks import Counts, Difference, GreedyCheck
from dspark.audit.reference import Reference
from dspark.progress import Progress
from dspark.result import GenerationResult


def check_greedy(
    results: Sequence[GenerationResult], reference: Reference, faults: Sequence[str], progress: Progress
) -> GreedyCheck:
    """Compares results at temperature 0 with the reference.

    The reference follows the engine's own text, so a swap of two equal candidates does not hide what comes
    after it; without such swaps, this is the same as comparing two texts.
    """
    differences, gaps, bounds, undecided = [], [], [], 0
    total, done = sum(len(result.token_ids) for result in results), 0
    for number, result in enumerate(results):
        text = list(result.prompt_token_ids)
        for position, token in enumerate(result.token_ids):
            row = reference.next_row(text)
            best, second = row.topk(2).values.tolist()
            bound = reference.bound(row)
            # The margin is 0 on a tie: torch does not promise the first of equal logits.
            expected = int(row.argmax())
            if token != expected and (margin := float(row[expected] - row[token])) > 0:
                differences.append(Difference(number, position, token, expected, margin, bound))
            gaps.append(best - second)
            bounds.append(bound)
            undecided += best - second <= bound
            text.append(token)
            done += 1
            progress("reference, temperature 0", done, total)
    return GreedyCheck(
        counts=Counts.of(results),
        differences=tuple(differences),
        smallest_gap=min(gaps, default=0.0),
        undecided=undecided,
        largest_bound=max(bounds, default=0.0),
        faults=tuple(faults),
    )
