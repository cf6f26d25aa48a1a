"""Checks of an adapted target that run the model, before anything is served.

Architectures differ in ways that no config tells: where they keep their state, whether rows of a pass see
later rows, what hidden states they report. A wrong guess would change the text silently, so each of these is
checked on the model itself, with a few short passes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from dspark.errors import ConfigError, first_line
from dspark.target.adapter import states
from dspark.target.adapter.cache import AdaptedCache
from dspark.target.adapter.head import LentHead
from dspark.target.adapter.model import TransformersTarget

RECURRENT_LAYERS = ("linear_attention", "mamba", "mamba2", "conv", "hybrid", "recurrent", "rwkv")
"""Entries of `layer_types` or `layers_block_type` whose state is not one row per position."""

ROUNDING = {torch.float64: 1e-5, torch.float32: 1e-3}
"""Accepted mean difference of logits between one pass over a text and two, as a share of their mean size.
Many models of transformers compute softmax and norms in float32 whatever their dtype."""

_RUN_ERRORS = (AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""What a forward may raise if it gets a cache or a dtype that it was not written for."""

SHORT_ROUNDING = 0.25
"""`ROUNDING` of 16-bit models, where a router may even choose other experts: only gross faults are found."""


def refuse_recurrent(model: Any, text: Any) -> None:
    """Raises `ConfigError` for a model that itself says that its state is recurrent."""
    name = type(model).__name__
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()
    found = sorted({str(kind) for kind in kinds} & set(RECURRENT_LAYERS))
    if getattr(model, "_is_stateful", False) or found:
        layers = f" ({', '.join(found)} layers)" if found else ""
        raise ConfigError(
            f"{name} cannot be a target: it keeps a recurrent state{layers}, which transformers cannot "
            "roll back by some of the last tokens"
        )


@torch.inference_mode()
def probe(target: TransformersTarget, text: Any) -> None:
    """Checks cache, rollback and hidden states, and finds the head that a draft may borrow.

    Raises:
        ConfigError: the model cannot be a target; says why.
    """
    name = target.config.architecture
    size = target.config.vocab_size
    tokens = [(1 + index * max(1, size // 7)) % size for index in range(6)]
    a, b, c, d, x, y = torch.split(torch.tensor(tokens, device=target.device), 1)
    cache = target.new_cache()
    try:
        output = target.run(torch.cat((a, b, c, d)), cache, hidden_states=True, last=False)
    except _RUN_ERRORS as error:
        raise _cannot_run(target, torch.cat((a, b)), error) from error
    logits = output.logits[0]
    _check_cache(name, cache, 4)
    target.position_bytes = states.held_bytes(cache.states) // 4
    _check_hidden_states(target, output)
    _check_logits(target, logits)
    _check_rollback(target, logits, a, b, c, d, x, y)
    target.unforkable = _fork_fault(target, a, b, c, x)
    hidden = output.hidden_states[-1][0]
    tolerance = ROUNDING.get(logits.dtype, 8 * torch.finfo(logits.dtype).eps)
    target.head = LentHead.find(target.model, text, hidden, logits, tolerance)
    tied = target.head.is_matrix(target.embedding_weight)
    target.config = dataclasses.replace(target.config, tie_word_embeddings=tied)


def _cannot_run(target: TransformersTarget, ids: Tensor, error: Exception) -> ConfigError:
    """The error for a model that did not run; a pass without a cache tells whether the cache is to blame."""
    why = "it does not run on a cache that keeps every position, so rejected tokens could not be rolled back"
    try:
        target.model(input_ids=ids[None], use_cache=False)
    except _RUN_ERRORS as own:
        why, error = f"it does not run in {str(target.dtype).removeprefix('torch.')}", own
    name = target.config.architecture
    return ConfigError(f"{name} cannot be a target: {why} ({type(error).__name__}: {first_line(error)})")


def _check_cache(name: str, cache: AdaptedCache, length: int) -> None:
    found = states.foreign_state(cache.states) or states.fault(cache.states, length)
    if found is not None:
        raise ConfigError(f"{name} cannot be a target: it {found}, which cannot be rolled back")


def _check_hidden_states(target: TransformersTarget, output: Any) -> None:
    """Checks what taps rely on: one entry for the embeddings and one for each layer, `[1, rows, hidden]`. The
    last is never tapped, and has another width in a few models."""
    config = target.config
    shapes = [tuple(entry.shape) for entry in getattr(output, "hidden_states", None) or ()]
    expected = (1, output.logits.shape[1], config.hidden_size)
    count = config.num_hidden_layers + 1
    if len(shapes) != count or any(shape != expected for shape in shapes[:-1]):
        raise ConfigError(
            f"{config.architecture} cannot be a target: expected {count} hidden states of shape "
            f"{list(expected)}, found {len(shapes)} of {sorted(set(shapes))}"
        )


def _check_logits(target: TransformersTarget, logits: Tensor) -> None:
    config, rows = target.config, target.embedding_weight.shape[0]
    if logits.shape[-1] != config.vocab_size or rows < config.vocab_size:
        raise ConfigError(
            f"{config.architecture} cannot be a target: vocab_size is {config.vocab_size}, but it has "
            f"{rows} embeddings and {logits.shape[-1]} logits"
        )


def _check_rollback(target: TransformersTarget, whole: Tensor, *tokens: Tensor) -> None:
    a, b, c, d, x, y = tokens
    clean, rolled = target.new_cache(), target.new_cache()
    for cache in (clean, rolled):
        target(torch.cat((a, b)), [(cache, 2)])
        cache.advance(2)
    target(torch.cat((x, y)), [(rolled, 2)])
    rolled.advance(0)
    expected, _ = target(c, [(clean, 1)])
    found, _ = target(c, [(rolled, 1)])
    # The shapes are the same in both, so only the rejected tokens could make a difference.
    size = float(expected.abs().max())
    if float((found - expected).abs().max()) > 4 * torch.finfo(expected.dtype).eps * size:
        raise ConfigError(
            f"{target.config.architecture} cannot be a target: rejected tokens still change its logits "
            "after the cache was rolled back"
        )
    rolled.advance(0)
    pieces, _ = target(torch.cat((c, x)), [(rolled, 2)])
    rolled.advance(1)
    last, _ = target(d, [(rolled, 1)])
    apart = (torch.cat((pieces[:1], last)) - whole[2:]).abs().mean()
    if float(apart) > ROUNDING.get(whole.dtype, SHORT_ROUNDING) * float(whole.abs().mean()):
        raise ConfigError(
            f"{target.config.architecture} cannot be a target: a text has other logits in two passes than "
            "in one, so its rows depend on more than the tokens before them"
        )


def _fork_fault(target: TransformersTarget, *tokens: Tensor) -> str | None:
    """Why a copy of a cache cannot serve another request, or None if it can: copy and source continue with
    different tokens, and neither may affect the other."""
    a, b, c, x = tokens
    name = target.config.architecture
    source, one, two = (target.new_cache() for _ in range(3))
    cache: AdaptedCache | None
    for cache, kept in ((source, 2), (one, 1), (two, 2)):
        target(torch.cat((a, b)), [(cache, 2)])
        cache.advance(kept)
    try:
        for cache, like, token in ((source.fork(1), one, x), (source, two, c)):
            found, _ = target(token, [(cache, 1)])
            expected, _ = target(token, [(like, 1)])
            tolerance = ROUNDING.get(found.dtype, 8 * torch.finfo(found.dtype).eps)
            if float((found - expected).abs().max()) > tolerance * float(expected.abs().max()):
                return f"a copied cache of {name} gives other logits than one that ran the tokens itself"
    except (ConfigError, *_RUN_ERRORS) as error:
        return f"caches of {name} cannot be copied ({type(error).__name__}: {first_line(error)})"
    return None
