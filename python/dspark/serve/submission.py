"""A request's way from what its caller gave to what the engine takes."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from dspark.errors import CapacityError, RequestError
from dspark.sampling import SamplingParams
from dspark.serve.arguments import DEFAULT
from dspark.serve.models import Models
from dspark.serve.options import PAGE, Options
from dspark.serve.request import Submission


def submission(
    models: Models, options: Options, prompt: Any, params: SamplingParams | None, called: float
) -> Submission:
    """The first sample of a prompt (text or token ids), whose call began at `called`.

    Raises:
        CapacityError: the prompt is longer than the context window.
        RequestError: the prompt, or parameters that do not fit these models.
    """
    params = (params or DEFAULT).with_defaults(models.generation_config)
    params.check_vocabulary(models.target.config.vocab_size)
    window = options.window(models)
    if not isinstance(prompt, str):
        _check_length(prompt, window)  # before its ids are looked at one by one
    tokens = models.tokens(prompt)
    _check_length(tokens, window)
    if params.stop_strings and models.tokenizer is None:
        raise RequestError("stop strings need the target's tokenizer, and it has none: use stop_token_ids")
    room = window - len(tokens)
    if params.max_tokens is None:
        most = _most(len(tokens), room, options.kv_tokens(models))
    else:
        most = min(params.max_tokens, room)
    return Submission(
        prompt=tokens,
        params=params,
        seed=secrets.randbits(64) if params.seed is None else int(params.seed),  # JSON has no numpy
        sample=0,
        max_tokens=most,
        end_ids=() if params.ignore_eos else models.end_token_ids,
        tokenizer=models.tokenizer,
        speculation=models.speculation if params.speculative else "off: speculative=False",
        called=called,
    )


def _check_length(tokens: Any, window: int) -> None:
    if isinstance(tokens, Sequence) and len(tokens) > window:
        raise CapacityError(f"the prompt has {len(tokens)} tokens, the context window {window}")


def _most(prompt: int, room: int, kv_tokens: int) -> int:
    """Tokens of a request that asks for as many as there is room for: in the window, and in caches that are
    smaller. One whose prompt alone fills these is left to be refused."""
    return max(1, min(room, kv_tokens // PAGE * PAGE - prompt)) if room else 0
