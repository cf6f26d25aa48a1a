"""The prompts and sampling parameters of one call, in every form that callers give them."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from dspark.errors import RequestError, shown
from dspark.sampling import SamplingParams

DEFAULT = SamplingParams()


def as_list(prompts: Any) -> Any:
    """An array or tensor of token ids as a list."""
    return prompts.tolist() if hasattr(prompts, "tolist") else prompts


def is_one_prompt(prompts: Any) -> bool:
    """Whether this is one prompt (text or ids); raises `RequestError` if it is no list of prompts either."""
    if isinstance(prompts, str):
        return True
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray | memoryview):
        raise RequestError(f"a prompt is a string or a list of token ids, not {type(prompts).__name__}")
    return len(prompts) > 0 and isinstance(prompts[0], Integral)


def one(params: Any, what: str = "a SamplingParams for one prompt") -> SamplingParams | None:
    """Checked parameters of one prompt; raises `RequestError`."""
    if params is None or isinstance(params, SamplingParams):
        return params
    raise RequestError(f"params must be {what}, not {shown(params)}")


def one_each(params: Any, count: int) -> list[SamplingParams | None]:
    """Checked parameters of each of `count` prompts; raises `RequestError`."""
    if not isinstance(params, Sequence):
        return [one(params, "a SamplingParams, or a list with one for each prompt")] * count
    if len(params) != count:
        raise RequestError(f"params has {len(params)} entries for {count} prompts")
    return [one(each) for each in params]


def one_sample(params: Any) -> SamplingParams | None:
    """Checked parameters of a stream; raises `RequestError`, also for more than one sample."""
    if samples(one(params)) != 1:
        raise RequestError(f"a stream has one sample, but n is {params.n}")
    return one(params)


def samples(params: SamplingParams | None) -> int:
    """How many samples are asked for."""
    return (params or DEFAULT).n
