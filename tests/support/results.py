"""Results that no engine has given."""

from __future__ import annotations

from collections.abc import Sequence

from dspark.result import GenerationResult, Round, Timing


def result_of(
    prompt: Sequence[int], tokens: Sequence[int], rounds: Sequence[Round], reason: str = "length"
) -> GenerationResult:
    timing = Timing(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, None, ())
    return GenerationResult("", tuple(tokens), tuple(prompt), reason, None, 0, tuple(rounds), timing)
