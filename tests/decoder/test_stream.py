"""`stream` and `astream`: pieces join to the text, and whoever leaves cancels."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from dspark import CapacityError, DSparkDecoder, RequestError, SamplingParams
from places import DATA

HYBRID = DATA / "hybrid"
PROMPT = "def read(self, size):\n"
Decoders = Callable[..., DSparkDecoder]
ENDLESS = SamplingParams(temperature=0.0, ignore_eos=True)


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 60, **changes})


def idle(decoder: DSparkDecoder) -> bool:
    for _ in range(200):
        stats = decoder.stats()
        if stats["running"] == stats["queued"] == 0:
            return True
        time.sleep(0.01)
    return False


def test_pieces_join_to_the_whole(decoders: Decoders) -> None:
    decoder = decoders()
    whole = decoder.generate(PROMPT, greedy())
    pieces = list(decoder.stream(PROMPT, greedy()))
    assert "".join(p.text for p in pieces) == whole.text
    assert sum((p.token_ids for p in pieces), ()) == whole.token_ids
    assert [p.result is not None for p in pieces] == [False] * (len(pieces) - 1) + [True]
    last = pieces[-1].result
    assert last is not None and last.text == whole.text and last.token_ids == whole.token_ids
    assert any(len(p.token_ids) > 1 for p in pieces), "a round's tokens come together"
    assert all(p.token_ids for p in pieces) and len(pieces) <= 1 + len(last.rounds), "one piece per round"


@pytest.mark.parametrize("stop_at", [5, 17, 40])
def test_a_stop_string_is_never_shown(decoders: Decoders, stop_at: int) -> None:
    decoder = decoders()
    text = decoder.generate(PROMPT, greedy()).text
    stop = text[stop_at : stop_at + 7]
    pieces = list(decoder.stream(PROMPT, greedy(stop=stop)))
    assert "".join(p.text for p in pieces) == text[: text.index(stop)]
    assert pieces[-1].result is not None and pieces[-1].result.stop_reason == stop


CHARACTERS = ["\U0001fae0", "\U0001f979", "\u9f9c"]
"""Three or four tokens each."""


@pytest.mark.parametrize("text", [*CHARACTERS, "e\u0301\u0323", "🏳️‍🌈 ok"])
@pytest.mark.parametrize("acceptance", ["rejection", "coupled"])
def test_broken_characters_join_to_the_text_too(decoders: Decoders, text: str, acceptance: str) -> None:
    """The model is made to say a character's tokens, in any order, and cut anywhere."""
    decoder = decoders(acceptance=acceptance)
    bias = dict.fromkeys(decoder.models.tokens(text), 60.0)
    for max_tokens in (1, 2, 3, 7, 23):
        params = SamplingParams(temperature=1.0, seed=max_tokens, max_tokens=max_tokens, logit_bias=bias)
        whole = decoder.generate(text, params)
        pieces = list(decoder.stream(text, params))
        assert "".join(p.text for p in pieces) == whole.text
        assert whole.text == decoder.models.require_tokenizer().decode(whole.token_ids)


@pytest.mark.parametrize("character", CHARACTERS)
@pytest.mark.parametrize("acceptance", ["rejection", "block", "coupled"])
def test_a_character_split_over_blocks_arrives_whole(
    decoders: Decoders, character: str, acceptance: str
) -> None:
    """Dictated behind one more letter each time, so that a border of blocks falls between any two of its
    tokens: the piece before shows nothing of it, the piece after all. A reader who is late gets several
    blocks in one piece, hence more than one attempt."""
    decoder = decoders(acceptance=acceptance)
    tokens = len(decoder.models.tokens(character))
    splits: set[int] = set()
    for letters in [*range(9)] * 20:
        text = "bcghjkmq"[:letters] + character + "!"
        pieces = list(decoder.stream("0", dictated(decoder, text)))
        assert "".join(p.text for p in pieces) == text
        shown, said = "", 0
        for piece in pieces:
            shown, said = shown + piece.text, said + len(piece.token_ids)
            complete = said >= letters + tokens
            assert shown.rstrip("!") == (text[: letters + 1] if complete else text[: min(said, letters)])
            if letters < said < letters + tokens:
                splits.add(said - letters)
        if len(splits) == tokens - 1:
            break
    assert splits == set(range(1, tokens)), "between any two tokens"


def dictated(decoder: DSparkDecoder, text: str) -> SamplingParams:
    """Parameters under which the model says `text`: each token is favoured less than the one before it, and
    not at all once it has been said. For texts whose tokens all differ."""
    ids = decoder.models.tokens(text)
    assert len(set(ids)) == len(ids)
    bias = {token: 1e5 - 1e3 * place for place, token in enumerate(ids)}
    return SamplingParams(
        temperature=1.0, seed=1, max_tokens=len(ids), logit_bias=bias, repetition_penalty=1e6
    )


def test_a_dropped_stream_leaves_no_trace(decoders: Decoders) -> None:
    decoder = decoders()
    expected = decoder.generate("import os\n", greedy())
    stream = decoder.stream(PROMPT, ENDLESS)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert idle(decoder)
    assert decoder.generate("import os\n", greedy()).token_ids == expected.token_ids
    stream = decoder.stream(PROMPT, ENDLESS)
    del stream
    assert idle(decoder), "a stream that nobody began is cancelled too"


@pytest.mark.parametrize("pair", [("tiny", "tiny-draft"), (HYBRID / "target", HYBRID / "draft-nested")])
def test_what_a_dropped_stream_leaves_goes_on_as_it_would_have(pair: tuple[Any, Any]) -> None:
    """Its rows are taken over by who begins as it did, and have to be those of its tokens."""
    prompt = list(range(3, 43))
    options: dict[str, Any] = {"device": "cpu", "dtype": "float64", "policy": "fixed"}
    with (
        DSparkDecoder.from_pretrained(*pair, **options) as decoder,
        DSparkDecoder.from_pretrained(*pair, **options) as fresh,
    ):
        stream = decoder.stream(prompt, ENDLESS)
        said = [*next(stream).token_ids, *next(stream).token_ids]
        stream.close()  # type: ignore[attr-defined]
        assert idle(decoder)
        params = greedy(max_tokens=30, ignore_eos=True)
        found, expected = (one.generate(prompt + said, params) for one in (decoder, fresh))
    assert found.reused_tokens > 0 and expected.reused_tokens == 0
    assert found.token_ids == expected.token_ids
    counts = [[(r.drafted, r.verified, r.accepted) for r in one.rounds] for one in (found, expected)]
    assert counts[0] == counts[1] and any(r.accepted for r in found.rounds)


def test_a_stream_raises_what_generate_raises(decoders: Decoders) -> None:
    with pytest.raises(RequestError):
        decoders().stream([9999])
    with pytest.raises(CapacityError):
        decoders().stream([1] * 2049)
    with pytest.raises(RequestError, match="one sample"):
        decoders().stream(PROMPT, SamplingParams(n=2))


def test_astream(decoders: Decoders) -> None:
    decoder = decoders()
    whole = decoder.generate(PROMPT, greedy())

    async def collect(prompt: str) -> tuple[str, Any]:
        text, result = "", None
        async for piece in decoder.astream(prompt, greedy()):
            text, result = text + piece.text, piece.result
        return text, result

    async def main() -> list[tuple[str, Any]]:
        return await asyncio.gather(*(collect(PROMPT) for _ in range(20)))

    for text, result in asyncio.run(main()):
        assert text == whole.text and result.token_ids == whole.token_ids


def test_leaving_an_async_stream_cancels(decoders: Decoders) -> None:
    decoder = decoders()

    async def leave() -> int:
        pieces = 0
        stream = decoder.astream(PROMPT, ENDLESS)
        async for _ in stream:
            pieces += 1
            if pieces == 3:
                break
        await stream.aclose()  # type: ignore[attr-defined]
        return pieces

    async def time_out() -> None:
        async for _ in decoder.astream(PROMPT, ENDLESS):
            pass

    assert asyncio.run(leave()) == 3
    assert idle(decoder)
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(time_out(), 0.2))
    assert idle(decoder)


def test_a_stream_outlives_the_name_of_its_decoder() -> None:
    pieces = list(
        DSparkDecoder.from_pretrained("tiny", "tiny-draft", policy="fixed").stream(PROMPT, greedy())
    )
    assert pieces[-1].result is not None and pieces[-1].result.finish_reason == "length"


def test_closing_the_decoder_ends_a_stream() -> None:
    decoder = DSparkDecoder.from_pretrained("tiny", "tiny-draft", policy="fixed")
    pieces: list[Any] = []
    reader = threading.Thread(target=lambda: pieces.extend(decoder.stream(PROMPT, ENDLESS)))
    reader.start()
    while not pieces:
        time.sleep(0.01)
    decoder.close()
    reader.join(10)
    assert pieces[-1].result.finish_reason == "abort"
