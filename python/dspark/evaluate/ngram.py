"""A drafter without a model: what followed the last few tokens when they came before (prompt lookup)."""

from __future__ import annotations

from collections.abc import Sequence

from dspark.result import Round

LONGEST = 3
"""Tokens that are looked for at first; then fewer, down to one."""


class Lookup:
    """The text so far, and where each of its short runs of tokens was seen last."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        """A run of tokens to the position after its latest occurrence that something follows."""
        for token in tokens:
            self.push(token)

    def push(self, token: int) -> None:
        """The next token. Only now something follows the runs that ended before it."""
        end = len(self._tokens)
        for n in range(1, min(LONGEST, end) + 1):
            self._after[tuple(self._tokens[end - n :])] = end
        self._tokens.append(token)

    def propose(self, limit: int) -> list[int]:
        """At most `limit` tokens: what followed the longest run at the end of the text that was there before,
        where it was seen last. Nothing if even the last token is new."""
        for n in range(min(LONGEST, len(self._tokens)), 0, -1):
            start = self._after.get(tuple(self._tokens[-n:]))
            if start is not None:
                return self._tokens[start : start + limit]
        return []


def lookup_rounds(
    prompt: Sequence[int], output: Sequence[int], block_size: int, max_tokens: int
) -> tuple[Round, ...]:
    """The rounds in which the lookup drafter would have given `output`, a text of the target alone.

    This is exact, not an estimate. A proposal x that is certain is accepted with probability p(x) under
    `rejection`, and what replaces it follows p without x: together a draw from p, accepted where it equals x.
    So the target's own draws, which `output` consists of, have the law of the accepted and corrected tokens,
    and the rounds over them that of the rounds. At temperature 0 nothing is random.
    """
    text, done, rounds = Lookup([*prompt, *output[:1]]), 1, []
    while done < len(output):
        draft = text.propose(min(block_size, max_tokens - done - 1))
        rest = output[done:]
        accepted = 0
        while accepted < min(len(draft), len(rest)) and draft[accepted] == rest[accepted]:
            accepted += 1
        committed = min(accepted + 1, len(rest))  # nothing follows an accepted token that ends the text
        rounds.append(Round(len(draft), len(draft), accepted, (), committed))
        for token in rest[:committed]:
            text.push(token)
        done += committed
    return tuple(rounds)
