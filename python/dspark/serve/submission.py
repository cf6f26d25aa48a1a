"""Turns what a caller gives into a request that the engine takes."""

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
        RequestError: the prompt is not valid, or the parameters do not fit these models.
    """
    params = (params or DEFAULT).with_defaults(models.generation_config)
    params.check_vocabulary(models.target.config.vocab_size)
    window = options.window(models)
    if not isinstance(prompt, str):
        _check_length(prompt, window)  # before its ids are looked at one by one
    tokens = models.tokens(prompt)
    _check_length(tokens, window)
    if params.stop_strings and models.tokenizer is None:
        raise RequestError("stop strings need a tokenizer, but the target has none: use stop_token_ids")
    room = window - len(tokens)
    if params.max_tokens is None:
        most = _most(len(tokens), room, options.kv_tokens(models))
    else:
        most = min(params.max_tokens, room)
    return Submission(
        prompt=tokens,
        params=params,
        seed=secrets.randbits(64) if params.seed is None else int(params.seed),  # not numpy's, for JSON
        sample=0,
        max_tokens=most,
        end_ids=() if params.ignore_eos else models.end_token_ids,
        tokenizer=models.tokenizer,
        speculation=models.speculation if params.speculative else "off: speculative=False",
        called=called,
    )


def _check_length(tokens: Any, window: int) -> None:
    if isinstance(tokens, Sequence) and len(tokens) > window:
        raise CapacityError(f"the prompt has {len(tokens)} tokens, but the context window holds {window}")


def _most(prompt: int, room: int, kv_tokens: int) -> int:
    """`max_tokens` of a request that sets none: as many as fit into the window, and into the caches if these
    are smaller. If the prompt alone fills the caches, the engine will refuse the request."""
    return max(1, min(room, kv_tokens // PAGE * PAGE - prompt)) if room else 0
