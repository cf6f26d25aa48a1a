"""How the tokens of a request are drawn and when it ends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any

from dspark.errors import RequestError, shown


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request; names and meaning as in vLLM.

    Parameters left at `None` come from the target's `generation_config.json`, else they have no effect
    (temperature 1, no truncation, no penalty). The transforms run in this order: min_tokens mask,
    logit_bias, repetition, frequency and presence penalties, temperature, top_k, top_p, min_p. This is
    the order of transformers; vLLM applies min_p before top_k.

    Raises `RequestError` for a value outside its range.
    """

    max_tokens: int | None = None
    """Tokens to generate at most; `None`: up to the context window; 0: an empty result."""
    min_tokens: int = 0
    """Nothing that ends a request is drawn or heeded before this many tokens."""
    temperature: float | None = None
    """0 is greedy: the argmax, ties to the lowest id."""
    top_k: int | None = None
    """Keep the k most likely tokens; 0 or -1 keeps all."""
    top_p: float | None = None
    """Keep the smallest set of tokens with at least this mass, in (0, 1]."""
    min_p: float | None = None
    """Keep tokens with at least this share of the largest probability, in [0, 1]."""
    repetition_penalty: float | None = None
    """Logits of tokens in prompt or output are divided (if positive) or multiplied by it; > 0."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token of the output, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it is in the output, in [-2, 2]."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids."""
    seed: int | None = None
    """64 bits; `None`: a fresh one for each prompt, reported in the result."""
    stop: str | Sequence[str] | None = None
    """Strings that end the request; cut out of the text."""
    stop_token_ids: Sequence[int] | None = None
    """Token ids that end the request, beside the model's own end tokens."""
    include_stop_str_in_output: bool = False
    """Leave the stop string in the text."""
    ignore_eos: bool = False
    """Do not end at the model's end tokens."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    logprobs: int | None = None
    """Report this many alternatives per token in addition to the token itself (0: the token alone). Log
    probabilities are taken after bias, penalties, temperature and truncation (vLLM's "processed_logprobs"),
    at temperature 0 after bias and penalties. Tokens cut by truncation are not listed, so there may be
    fewer."""
    n: int = 1
    """Samples per prompt."""
    speculative: bool = True
    """False: decode this request without the draft, and spend nothing on it."""
    timeout: float | None = None
    """Seconds after which the request ends with finish_reason "abort"."""

    # Parameters of other engines that have no meaning here: naming them is an error, not a silent no-op.
    guided_decoding: None = field(default=None, repr=False)
    structured_outputs: None = field(default=None, repr=False)
    bad_words: None = field(default=None, repr=False)
    prompt_logprobs: None = field(default=None, repr=False)
    lora_request: None = field(default=None, repr=False)
    multi_modal_data: None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in _UNSUPPORTED:
            if getattr(self, name) is not None:
                raise RequestError(f"{name} is not supported by dspark")
        for name, low, high, what in _RANGES:
            value = getattr(self, name)
            if value is not None and not _is_between(value, low, high, Integral if name in _WHOLE else Real):
                raise RequestError(f"{name} must be {what}, not {shown(value)}")
        if self.top_p is not None and float(self.top_p) <= 0:
            raise RequestError(f"top_p must be a number in (0, 1], not {shown(self.top_p)}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens = {self.min_tokens} is more than max_tokens = {self.max_tokens}")
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "speculative"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be True or False, not {shown(getattr(self, name))}")
        self._check_stops()
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"logit_bias must map token ids to numbers, not {shown(self.logit_bias)}")
        for token, bias in (self.logit_bias or {}).items():
            is_bias = isinstance(bias, bool) or _is_between(bias, -MAX_BIAS, MAX_BIAS, Real)
            if not _is_token(token) or not is_bias:
                raise RequestError(
                    f"logit_bias must map token ids to numbers from {-MAX_BIAS:g} to {MAX_BIAS:g}, "
                    f"not {shown(token)}: {shown(bias)}"
                )

    def _check_stops(self) -> None:
        stop, ids = self.stop, self.stop_token_ids
        texts = [stop] if isinstance(stop, str) else stop
        if texts is not None and not (isinstance(texts, Sequence) and all(map(_is_text, texts))):
            raise RequestError(f"stop must be a non-empty string or a list of these, not {shown(stop)}")
        if ids is not None and not (isinstance(ids, Sequence) and all(map(_is_token, ids))):
            raise RequestError(f"stop_token_ids must be a list of token ids, not {shown(ids)}")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def check_vocabulary(self, size: int) -> None:
        """Raises `RequestError` for a token id that a vocabulary of that size does not have."""
        for name, ids in (
            ("logit_bias", self.logit_bias or ()),
            ("stop_token_ids", self.stop_token_ids or ()),
        ):
            for token in ids:
                if token >= size:
                    raise RequestError(f"{name} names token {token}, outside of the ids from 0 to {size - 1}")

    def with_defaults(self, generation_config: Mapping[str, Any]) -> SamplingParams:
        """A copy in which nothing is `None` that `generation_config` or the neutral value can fill."""
        greedy = generation_config.get("do_sample") is False
        filled: dict[str, Any] = {}
        for name, neutral in _NEUTRAL.items():
            if getattr(self, name) is None:
                given = generation_config.get(name)
                filled[name] = neutral if given is None else given
        if self.temperature is None and greedy:
            filled["temperature"] = 0.0
        return replace(self, **filled)


MAX_BIAS = 1e6
"""Larger biases would leave the range of float32 once added."""


def _is_between(value: Any, low: float, high: float, kind: type) -> bool:
    if not isinstance(value, kind) or isinstance(value, bool):
        return False
    number: Any = value
    if kind is Integral:
        return bool(low <= number <= high)
    try:  # the engine computes with floats: what is beyond them has no meaning there
        return low <= float(number) <= high
    except (OverflowError, ValueError):
        return False


def _is_token(token: Any) -> bool:
    return isinstance(token, Integral) and not isinstance(token, bool) and 0 <= int(token) < 2**31


def _is_text(text: Any) -> bool:
    """A string that is not empty and has no lone surrogates, which no tokenizer could give."""
    return isinstance(text, str) and bool(text) and not any("\ud800" <= c <= "\udfff" for c in text)


_UNSUPPORTED = (
    "guided_decoding",
    "structured_outputs",
    "bad_words",
    "prompt_logprobs",
    "lora_request",
    "multi_modal_data",
)
_NEUTRAL: dict[str, float | int] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
_WHOLE = {"max_tokens", "min_tokens", "top_k", "seed", "logprobs", "n"}
_RANGES: tuple[tuple[str, float, float, str], ...] = (
    ("max_tokens", 0, 2**31, "a whole number from 0 to 2^31"),
    ("min_tokens", 0, 2**31, "a whole number from 0 to 2^31"),
    ("temperature", 0.0, 1e6, "a number from 0 to 1e6"),
    ("top_k", -1, 2**31, "a whole number from 1 to 2^31, or 0 or -1 for no limit"),
    ("top_p", 0.0, 1.0, "a number in (0, 1]"),
    ("min_p", 0.0, 1.0, "a number in [0, 1]"),
    ("repetition_penalty", 1e-9, 1e9, "a number above 0, from 1e-9 to 1e9"),
    ("presence_penalty", -2.0, 2.0, "a number in [-2, 2]"),
    ("frequency_penalty", -2.0, 2.0, "a number in [-2, 2]"),
    ("seed", 0, 2**64 - 1, "a whole number from 0 to 2^64 - 1"),
    ("logprobs", 0, 1000, "a whole number in [0, 1000]"),
    ("n", 1, 4096, "a whole number in [1, 4096]"),
    ("timeout", 0.0, math.inf, "a number of seconds, at least 0 and no larger than a float can be"),
)
