"""Where a text ends: an end at every place of a block, several ends at once, nothing counted after them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from dspark import DSparkDecoder, GenerationResult, SamplingParams
from random_pair import write_draft, write_target

PROMPT = "def read(self, size):\n"
Decoders = Callable[..., DSparkDecoder]


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 60, **changes})


COUNTING: dict[str, Any] = {
    "logit_bias": {100 + k: 1000.0 - 10 * k for k in range(40)},
    "repetition_penalty": 1e6,
}
"""Lets draft and target alike say 100, 101, 102, ...: whole blocks are accepted, and no token comes twice."""


def places(result: GenerationResult) -> Iterator[tuple[int, int, bool]]:
    """For each token behind the prefill's: its index in the text, its place in its round, whether it is the
    corrected or bonus one."""
    index = 1
    for round_ in result.rounds:
        for place in range(round_.committed):
            yield index, place, place == round_.accepted
            index += 1


def check_account(result: GenerationResult, whole: GenerationResult) -> None:
    """Nothing after the end is emitted or counted, and until there all is as without it."""
    count = len(result.token_ids)
    assert result.token_ids == whole.token_ids[:count]
    assert sum(r.committed for r in result.rounds) == count - 1
    assert all(r.committed <= r.accepted + 1 and r.accepted <= r.verified <= r.drafted for r in result.rounds)
    # Before the last round the account is the same; there it ends with the token that ended the text.
    assert result.rounds[:-1] == whole.rounds[: len(result.rounds) - 1]
    if result.rounds:
        mean = (count - 1) / len(result.rounds)
        assert result.acceptance_length == pytest.approx(mean)


@pytest.mark.parametrize("several", [False, True], ids=["one end", "several ends"])
@pytest.mark.parametrize("acceptance", ["rejection", "block", "coupled"])
def test_an_end_at_every_place_of_a_block(decoders: Decoders, acceptance: str, several: bool) -> None:
    decoder = decoders(dtype="float64", acceptance=acceptance)
    seen: set[tuple[int, bool]] = set()
    for params in (greedy(max_tokens=24), greedy(max_tokens=24, **COUNTING)):
        whole = decoder.generate(PROMPT, params)
        for index, place, is_ours in places(whole):
            token = whole.token_ids[index]
            if whole.token_ids.index(token) != index:
                continue  # it would end the text earlier
            ends = [511, token, 510] if several else [token]
            result = decoder.generate(PROMPT, replace(params, stop_token_ids=ends))
            assert len(result.token_ids) == index + 1
            assert (result.finish_reason, result.stop_reason) == ("stop", token)
            check_account(result, whole)
            seen.add((place, is_ours))
    gamma = decoder.models.gamma
    # Accepted at every index of a block, and as the token that the target adds: after none, and after all.
    assert {(place, False) for place in range(gamma)} <= seen, seen
    assert {(0, True), (gamma, True)} <= seen, seen


@pytest.mark.parametrize("end", [0, 3, 5])
def test_the_models_own_end_tokens_end_anywhere(tmp_path: Path, end: int) -> None:
    """A vocabulary of seven, so that the end comes early and late, in blocks that are mostly accepted."""
    target = write_target(tmp_path / "target", 7)
    draft = write_draft(tmp_path / "draft", 7, block_size=5)
    with DSparkDecoder.from_pretrained(target, draft, acceptance="coupled") as decoder:
        wholes = [decoder.generate([s], SamplingParams(max_tokens=40, seed=s)) for s in range(6)]
    config = (
        (target / "config.json").read_text().replace('"eos_token_id": null', f'"eos_token_id": [{end}, 6]')
    )
    (target / "config.json").write_text(config)
    with DSparkDecoder.from_pretrained(target, draft, acceptance="coupled") as decoder:
        for s, whole in enumerate(wholes):
            stops = [k for k, token in enumerate(whole.token_ids) if token in (end, 6)]
            result = decoder.generate([s], SamplingParams(max_tokens=40, seed=s))
            assert result.token_ids == whole.token_ids[: stops[0] + 1 if stops else None]
            assert result.finish_reason == ("stop" if stops else "length") and result.stop_reason is None
            ignored = decoder.generate([s], SamplingParams(max_tokens=40, seed=s, ignore_eos=True))
            assert ignored.token_ids == whole.token_ids


@pytest.mark.parametrize("acceptance", ["rejection", "coupled"])
def test_a_stop_string_over_every_border_of_rounds(decoders: Decoders, acceptance: str) -> None:
    """The string begins in one round and ends in the next, or the one after, alone and streamed."""
    decoder = decoders(dtype="float64", acceptance=acceptance)
    whole = decoder.generate(PROMPT, greedy())
    tokenizer = decoder.models.require_tokenizer()
    borders, index = [], 1
    for round_ in whole.rounds:
        borders.append(len(tokenizer.decode(whole.token_ids[:index])))
        index += round_.committed
    spanned = 0
    for border in borders[::2]:
        for before, after in ((1, 1), (4, 3), (8, 12)):
            stop = whole.text[max(0, border - before) : border + after]
            at = whole.text.index(stop)
            spanned += at < border < at + len(stop)
            pieces = list(decoder.stream(PROMPT, greedy(stop=stop)))
            result = pieces[-1].result
            assert result is not None and result.text == whole.text[:at] == "".join(p.text for p in pieces)
            assert (result.finish_reason, result.stop_reason) == ("stop", stop)
            check_account(result, whole)
            # The token that completes it is the last one: with one fewer the string is not there.
            assert stop in tokenizer.decode(result.token_ids)
            assert stop not in tokenizer.decode(result.token_ids[:-1])
            kept = decoder.generate(PROMPT, greedy(stop=stop, include_stop_str_in_output=True))
            assert kept.text == whole.text[: at + len(stop)] and kept.token_ids == result.token_ids
    assert spanned > 6


@pytest.mark.parametrize("options", [{}, {"draft": None}], ids=["draft", "plain"])
@pytest.mark.parametrize("max_tokens", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
def test_max_tokens_is_exact_at_every_length(
    decoders: Decoders, max_tokens: int, options: dict[str, Any]
) -> None:
    decoder = decoders(dtype="float64", **options)
    whole = decoder.generate(PROMPT, greedy())
    pieces = list(decoder.stream(PROMPT, greedy(max_tokens=max_tokens)))
    result = pieces[-1].result
    assert result is not None and result.token_ids == whole.token_ids[:max_tokens]
    assert result.finish_reason == "length" and sum(len(p.token_ids) for p in pieces) == max_tokens
    assert sum(r.committed for r in result.rounds) == max(0, max_tokens - 1)


def test_the_last_allowed_token_may_be_an_end(decoders: Decoders) -> None:
    decoder = decoders(dtype="float64")
    whole = decoder.generate(PROMPT, greedy())
    for count in range(1, 20):
        token = whole.token_ids[count - 1]
        if whole.token_ids.index(token) == count - 1:
            result = decoder.generate(PROMPT, greedy(max_tokens=count, stop_token_ids=[token]))
            assert (result.finish_reason, len(result.token_ids)) == ("stop", count)


def test_pieces_count_by_their_ids(decoders: Decoders) -> None:
    """A piece holds the tokens of a round, or of several where its reader is late, whatever text it shows."""
    decoder = decoders(dtype="float64")
    for params in (greedy(), greedy(stop="never there"), replace(greedy(), logprobs=1)):
        pieces = list(decoder.stream(PROMPT, params))
        result = pieces[-1].result
        assert result is not None
        # The prompt gives the first token, each round what it committed.
        ends = set(accumulate((r.committed for r in result.rounds), initial=1))
        assert set(accumulate(len(p.token_ids) for p in pieces)) <= ends
        assert sum((p.token_ids for p in pieces), ()) == result.token_ids
        assert len(pieces) < len(result.token_ids), "several tokens came in one piece"
