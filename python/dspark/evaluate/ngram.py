"""A drafter without a model: it proposes what followed the last few tokens earlier on (prompt lookup)."""

from __future__ import annotations

from collections.abc import Sequence

from dspark.result import Round

LONGEST = 3
"""The longest run of tokens to look for, tried first; then shorter ones, down to one token."""


class Lookup:
    """The text so far, and where each of its short runs of tokens was seen last."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        """Maps a run of tokens to the position after its latest occurrence that something follows."""
        for token in tokens:
            self.push(token)

    def push(self, token: int) -> None:
        """Appends the next token. Only now does something follow the runs that ended before it."""
        end = len(self._tokens)
        for n in range(1, min(LONGEST, end) + 1):
            self._after[tuple(self._tokens[end - n :])] = end
        self._tokens.append(token)

    def propose(self, limit: int) -> list[int]:
        """At most `limit` tokens: those after the latest earlier occurrence of the longest run at the end of
        the text that has one. Nothing if even the last token is new."""
        for n in range(min(LONGEST, len(self._tokens)), 0, -1):
            start = self._after.get(tuple(self._tokens[-n:]))
            if start is not None:
                return self._tokens[start : start + limit]
        return []


def lookup_rounds(
    prompt: Sequence[int], output: Sequence[int], block_size: int, max_tokens: int
) -> tuple[Round, ...]:
    """The rounds in which the lookup drafter would have given `output`, a text of the target alone.

    This is exact, not an estimate. Under `rejection`, a deterministic proposal x is accepted with probability
    p(x), and its replacement follows p without x: together a draw from p, accepted if it equals x. So the
    target's own draws, which `output` consists of, are distributed like accepted and corrected tokens, and
    the rounds counted over them like real rounds. At temperature 0 nothing is random.
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
