"""Text that the target writes itself: answers to given prompts, or to prompts that it makes up."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dspark.decoder import DSparkDecoder
from dspark.errors import CapacityError, ConfigError, QueueFullError
from dspark.prompts import read_turns
from dspark.result import GenerationResult
from dspark.sampling import SamplingParams
from dspark.text import Tokenizer
from dspark.train.data.conversations import Conversation
from dspark.train.world import World

MARK = "\u2063user turn\u2063"
"""A user's turn that no template contains itself: the text before it ends with the user's tag."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How answers are drawn: at temperatures uniform between two bounds, as in use."""

    temperatures: tuple[float, float] = (0.7, 0.7)
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int = 256

    def params(self, *numbers: int) -> SamplingParams:
        """The parameters of one answer; everything random in them depends on the numbers."""
        seeds = np.random.SeedSequence(numbers)
        low, high = self.temperatures
        return SamplingParams(
            temperature=round(float(np.random.default_rng(seeds).uniform(low, high)), 4),
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=self.max_tokens,
            seed=int(seeds.generate_state(1, np.uint64)[0]),
        )

    def filled(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """The sampling apart from the temperature, with the target's `defaults` for what is not given."""
        params = self.params(0).with_defaults(defaults)
        return {name: getattr(params, name) for name in ("top_k", "top_p", "min_p", "repetition_penalty")}


@dataclass(frozen=True, slots=True)
class Asked:
    """One conversation to make: the user's turns, and a number that seeds it."""

    turns: tuple[str, ...]
    number: int


class LeftOut:
    """Counts what generation gave up on, by reason; several threads can add to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()

    def add(self, why: str, count: int = 1) -> None:
        """Counts `count` more for this reason."""
        with self._lock:
            self.counts[why] += count

    def of_all(self, world: World) -> LeftOut:
        """The counts of all processes together; every one must call this."""
        reasons = (NO_ROOM, CUT_TURNS, ENDLESS)
        counts = world.sum(torch.tensor([self.counts[why] for why in reasons], device=world.device))
        found = LeftOut()
        for why, count in zip(reasons, counts.tolist(), strict=True):
            found.add(why, count)
        return found

    def said(self) -> str:
        """The counts as text; empty if nothing was left out."""
        return ", ".join(f"{count:,} {why}" for why, count in sorted(self.counts.items()) if count)


NO_ROOM = "answers that had no room in the context window"
CUT_TURNS = "dialogues ended by an answer that --max-tokens cut"
ENDLESS = "made-up prompts without an end or a text"


def read_prompts(file: Path, samples: int) -> list[Asked]:
    """`samples` conversations to make for each different prompt of a JSON lines file; errors as in
    `read_turns`."""
    unique = list(dict.fromkeys(read_turns(file)))
    return [Asked(turns, i) for i, turns in enumerate(turns for turns in unique for _ in range(samples))]


def answer(
    decoder: DSparkDecoder,
    asked: Sequence[Asked],
    sampling: Sampling,
    seed: int,
    left_out: LeftOut | None = None,
    tokenizer: Tokenizer | None = None,
) -> list[Conversation]:
    """The target's answers, turn by turn. Every answer becomes a conversation of its own, with everything
    before it as its prompt. If the decoder has a draft, the positions of failed verify passes are kept.

    A dialogue ends where it outgrows the context window, and after an answer that `max_tokens` cut: in use
    nobody replies to half an answer. Both are counted in `left_out`; any other failure is raised.
    `tokenizer` renders the chats; None: the target's as it is."""
    left_out = left_out or LeftOut()
    tokenizer = tokenizer or decoder.models.require_tokenizer()
    found: list[Conversation] = []
    messages: list[list[dict[str, str]]] = [[] for _ in asked]
    dialogues: dict[int, int] = {}
    going, turn = list(range(len(asked))), 0
    while going := [i for i in going if turn < len(asked[i].turns)]:
        for i in going:
            messages[i].append({"role": "user", "content": asked[i].turns[turn]})
        prompts = [render(tokenizer, messages[i]) for i in going]
        params = [sampling.params(seed, asked[i].number, turn) for i in going]
        results = _fitting(decoder, decoder.generate(prompts, params), left_out)
        answered = {i: one for i, one in zip(going, results, strict=True) if one is not None}
        for i, result in answered.items():
            one = dataclasses.replace(conversation(result), dialogue=dialogues.get(i))
            dialogues[i] = one.prompt_number()
            found.append(one)
            messages[i].append({"role": "assistant", "content": result.text})
        going, turn = [i for i, one in answered.items() if one.finish_reason != "length"], turn + 1
        cut = [i for i in answered if i not in going and turn < len(asked[i].turns)]
        left_out.add(CUT_TURNS, len(cut))
    return found


def render(tokenizer: Tokenizer, messages: Sequence[dict[str, str]]) -> list[int]:
    """The prompt of a chat: rendered by the target's template, or without one, the text of the only turn."""
    if tokenizer.has_chat_template:
        return tokenizer.render_chat(messages)
    if len(messages) != 1:
        raise ConfigError("a target without a chat template answers prompts of one turn only")
    return tokenizer.encode(messages[0]["content"])


def _fitting(
    decoder: DSparkDecoder, results: Sequence[GenerationResult], left_out: LeftOut
) -> list[GenerationResult | None]:
    """The results, with None for empty ones and those that had no room in the context window or the cache.
    Other errors are raised."""
    for one in results:
        # A full queue or an engine that has ended has nothing to do with the prompt's length.
        of_length = isinstance(one.error, CapacityError) and not isinstance(one.error, QueueFullError)
        if one.error is not None and not (of_length and decoder.state == "running"):
            raise one.error
    left_out.add(NO_ROOM, sum(one.error is not None for one in results))
    return [one if one.error is None and one.token_ids else None for one in results]


def conversation(result: GenerationResult) -> Conversation:
    """A result as a conversation to train on."""
    tokens = np.array([*result.prompt_token_ids, *result.token_ids], np.int64)
    start = len(result.prompt_token_ids)
    failed, at = [], start + 1  # the first token comes from the prefill
    for one in result.rounds:
        if one.accepted < one.verified:
            failed.append(at + one.accepted)
        at += one.committed
    kept = np.array([position for position in failed if position < len(tokens)], np.int64)
    return Conversation(tokens, ((start, len(tokens)),), kept)


def invent(
    decoder: DSparkDecoder,
    numbers: Sequence[int],
    openers: Sequence[str],
    sampling: Sampling,
    seed: int,
    left_out: LeftOut | None = None,
    tokenizer: Tokenizer | None = None,
) -> list[Asked]:
    """Users' turns that the target makes up after its own user tag, each continuing an opener if there are
    any. Without openers, the turns have little variety. Those that do not end are counted in `left_out`.
    `tokenizer`: as for `answer`."""
    left_out = left_out or LeftOut()
    tokenizer = tokenizer or decoder.models.require_tokenizer()
    opening, closing = user_tags(tokenizer)
    starts = []
    for number in numbers:
        seeded = np.random.default_rng((seed, number))
        opener = openers[int(seeded.integers(len(openers)))].rstrip() if openers else ""
        starts.append(opener)
    prompts = [tokenizer.encode_chat(opening + opener) for opener in starts]
    params = [sampling.params(seed, number, 1 << 20) for number in numbers]
    end = closing.strip().split("\n")[0] or closing
    ends = decoder.models.end_token_ids
    if end and not set(tokenizer.encode_chat(end)[:1]) & set(ends):
        # The target does not end users' turns itself ("[INST] ... [/INST]"), so their closing tag has to end
        # them. It may be a special token, which is in the text only if these are shown.
        params = [dataclasses.replace(one, stop=end, skip_special_tokens=False) for one in params]
    marks = [end] if end else []
    marks += [tokenizer.decode([token], skip_special_tokens=False) for token in ends]
    asked = []
    results = _fitting(decoder, decoder.generate(prompts, params), left_out)
    for number, opener, result in zip(numbers, starts, results, strict=True):
        if result is None:
            continue
        text = opener + result.text
        for mark in filter(None, marks):
            text = text.split(mark)[0]
        if result.finish_reason == "stop" and text.strip():
            asked.append(Asked((text.strip(),), number))
        else:
            left_out.add(ENDLESS)
    return asked


def user_tags(tokenizer: Tokenizer) -> tuple[str, str]:
    """What the target's template writes before and after a user's turn.

    Raises:
        ConfigError: the template does not write the turn as it is.
    """
    text = tokenizer.chat_text([{"role": "user", "content": MARK}])
    before, mark, after = text.partition(MARK)
    if not mark:
        raise ConfigError("the target's chat template rewrites users' turns: no prompts can be made up")
    return before, after
