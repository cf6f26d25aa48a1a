"""Text that the target writes itself: answers to given prompts, or to prompts that it makes up."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dspark.audit.prompts import read_turns
from dspark.decoder import DSparkDecoder
from dspark.errors import CapacityError, ConfigError
from dspark.result import GenerationResult
from dspark.sampling import SamplingParams
from dspark.train.data.conversations import Conversation

MARK = "\u2063user turn\u2063"
"""A user's turn that no template writes itself: what stands before it ends with the user's tag."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How answers are drawn: temperatures uniform between two bounds, as in use."""

    temperatures: tuple[float, float] = (0.7, 0.7)
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int = 256

    def params(self, *numbers: int) -> SamplingParams:
        """Of one answer; everything random depends on the numbers."""
        seeds = np.random.SeedSequence(numbers)
        low, high = self.temperatures
        return SamplingParams(
            temperature=round(float(np.random.default_rng(seeds).uniform(low, high)), 4),
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=self.max_tokens,
            seed=int(seeds.generate_state(1, np.uint64)[0]),
        )


@dataclass(frozen=True, slots=True)
class Asked:
    """One conversation to make: the user's turns, and a number that seeds it."""

    turns: tuple[str, ...]
    number: int


def read_prompts(file: Path, samples: int) -> list[Asked]:
    """The different prompts of a JSON lines file, `samples` conversations of each; errors as in
    `read_turns`."""
    unique = list(dict.fromkeys(read_turns(file)))
    return [Asked(turns, i) for i, turns in enumerate(turns for turns in unique for _ in range(samples))]


def answer(
    decoder: DSparkDecoder, asked: Sequence[Asked], sampling: Sampling, seed: int
) -> list[Conversation]:
    """The target's answers, turn by turn. Every answer is a conversation of its own, with what came before it
    as its prompt. Where the decoder has a draft, positions of failed verify passes are kept.

    A conversation ends where it outgrows the context window; any other failure is raised."""
    found: list[Conversation] = []
    messages: list[list[dict[str, str]]] = [[] for _ in asked]
    dialogues: dict[int, int] = {}
    going, turn = list(range(len(asked))), 0
    while going := [i for i in going if turn < len(asked[i].turns)]:
        for i in going:
            messages[i].append({"role": "user", "content": asked[i].turns[turn]})
        prompts = [decoder.render_chat(messages[i]) for i in going]
        params = [sampling.params(seed, asked[i].number, turn) for i in going]
        results = _fitting(decoder.generate(prompts, params))
        answered = {i: one for i, one in zip(going, results, strict=True) if one is not None}
        for i, result in answered.items():
            one = dataclasses.replace(conversation(result), dialogue=dialogues.get(i))
            dialogues[i] = one.prompt_number()
            found.append(one)
            messages[i].append({"role": "assistant", "content": result.text})
        going, turn = list(answered), turn + 1
    return found


def _fitting(results: Sequence[GenerationResult]) -> list[GenerationResult | None]:
    """None for those that had no room in the context window or the cache; raises what else failed."""
    for one in results:
        if one.error is not None and not isinstance(one.error, CapacityError):
            raise one.error
    return [one if one.error is None and one.token_ids else None for one in results]


def conversation(result: GenerationResult) -> Conversation:
    """A result as something to train on."""
    tokens = np.array([*result.prompt_token_ids, *result.token_ids], np.int64)
    start = len(result.prompt_token_ids)
    failed, at = [], start + 1  # the first token is the prefill's own
    for one in result.rounds:
        if one.accepted < one.verified:
            failed.append(at + one.accepted)
        at += one.committed
    kept = np.array([position for position in failed if position < len(tokens)], np.int64)
    return Conversation(tokens, ((start, len(tokens)),), kept)


def invent(
    decoder: DSparkDecoder, numbers: Sequence[int], openers: Sequence[str], sampling: Sampling, seed: int
) -> list[Asked]:
    """Users' turns that the target makes up after its own user tag, behind a written opener where there are
    any. Free self-talk is narrow; openers are what widens it."""
    opening, closing = user_tags(decoder)
    tokenizer = decoder.models.require_tokenizer()
    starts = []
    for number in numbers:
        seeded = np.random.default_rng((seed, number))
        opener = openers[int(seeded.integers(len(openers)))].rstrip() if openers else ""
        starts.append(opener)
    prompts = [tokenizer.encode_chat(opening + opener) for opener in starts]
    params = [sampling.params(seed, number, 1 << 20) for number in numbers]
    end = closing.strip().split("\n")[0]
    asked = []
    results = _fitting(decoder.generate(prompts, params))
    for number, opener, result in zip(numbers, starts, results, strict=True):
        if result is None or result.finish_reason != "stop":
            continue
        text = (opener + result.text).split(end)[0].strip() if end else (opener + result.text).strip()
        if text:
            asked.append(Asked((text,), number))
    return asked


def user_tags(decoder: DSparkDecoder) -> tuple[str, str]:
    """What the target's template writes before and after a user's turn.

    Raises:
        ConfigError: the template does not write the turn as it is.
    """
    tokenizer = decoder.models.require_tokenizer()
    text = tokenizer.chat_text([{"role": "user", "content": MARK}])
    before, mark, after = text.partition(MARK)
    if not mark:
        raise ConfigError("the target's chat template rewrites users' turns: no prompts can be made up")
    return before, after


def settings_of(kind: str, target: str, sampling: Sampling, seed: int, **more: Any) -> dict[str, Any]:
    """What decides about generated text, for `Shards`."""
    return {
        "kind": kind,
        "target": target,
        "temperatures": list(sampling.temperatures),
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": sampling.max_tokens,
        "seed": seed,
        **more,
    }
