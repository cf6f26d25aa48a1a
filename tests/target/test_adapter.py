"""Targets that run through transformers: the same promises as those of the native targets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adapter_zoo import DTYPE, EXACT, KINDS, VOCAB, write
from dspark.errors import CapacityError, ConfigError
from dspark.target import Target, load_target
from dspark.target.adapter import states
from dspark.target.adapter.cache import AdaptedCache
from dspark.target.adapter.model import TransformersTarget
from random_pair import HIDDEN, LAYERS

TAPS = (-1, 0, 1)


@pytest.fixture(scope="module", autouse=True)
def softmax_in_the_dtype_of_its_input() -> Iterator[None]:
    """Some models ask for float32 whatever their dtype; then float64 would be exact to six digits only."""
    plain = torch.nn.functional.softmax

    def softmax(x: Tensor, dim: int = -1, dtype: Any = None, **options: Any) -> Tensor:
        return plain(x, dim=dim, dtype=x.dtype if x.dtype == torch.float64 else dtype, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "softmax", softmax)
        yield


@pytest.fixture(scope="module", params=KINDS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TransformersTarget:
    path = write(tmp_path_factory.mktemp("target"), request.param)
    loaded = load_target(path, dtype=DTYPE[request.param])
    assert isinstance(loaded, TransformersTarget)
    return loaded


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def run(target: Target, cache: AdaptedCache, ids: Tensor, keep: int | None = None) -> tuple[Tensor, Tensor]:
    with torch.inference_mode():
        logits, taps = target(ids, [(cache, len(ids))], TAPS)
    assert taps is not None
    cache.advance(len(ids) if keep is None else keep)
    return logits, taps


def near(target: Target, found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() < EXACT[target.dtype] * max(1.0, float(expected.abs().max())))


def decoder_layers(model: torch.nn.Module) -> torch.nn.ModuleList:
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == LAYERS]
    return lists[0]


def test_logits_and_taps_are_those_of_the_modules(target: TransformersTarget) -> None:
    """Taps by hooks on the decoder layers: a way that the adapter itself does not go."""
    ids = tokens(40)
    entered: list[Tensor] = []
    left: list[Tensor] = []
    layers = decoder_layers(target.model)

    def enter(_: Any, args: Any, kwargs: Any) -> None:
        entered.append(args[0] if args else kwargs["hidden_states"])

    def leave(_: Any, __: Any, output: Any) -> None:
        left.append(output[0] if isinstance(output, tuple) else output)

    hooks = [layers[0].register_forward_pre_hook(enter, with_kwargs=True)]
    hooks += [layer.register_forward_hook(leave) for layer in layers]
    with torch.inference_mode():
        expected = target.model(input_ids=ids[None], use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    logits, taps = run(target, target.new_cache(), ids)
    assert expected.abs().max() > 0.5
    assert near(target, logits, expected)
    assert near(target, taps, torch.cat([entered[0][0], left[0][0], left[1][0]], dim=-1))
    assert taps.shape == (40, 3 * HIDDEN)


@pytest.mark.parametrize("chunk", [1, 3, 50])
def test_chunks_equal_the_whole(target: TransformersTarget, chunk: int) -> None:
    ids = tokens(50)
    logits, taps = run(target, target.new_cache(), ids)
    cache = target.new_cache()
    pieces = [run(target, cache, piece) for piece in ids.split(chunk)]
    assert cache.length == 50
    assert near(target, torch.cat([piece[0] for piece in pieces]), logits)
    assert near(target, torch.cat([piece[1] for piece in pieces]), taps)


def test_a_ragged_batch_equals_each_request_alone(target: TransformersTarget) -> None:
    prompts = [tokens(n, seed=n) for n in (1, 7, 30)]
    batch = [target.new_cache() for _ in prompts]
    with torch.inference_mode():
        last, nothing = target(
            torch.cat(prompts), list(zip(batch, map(len, prompts), strict=True)), logits="last"
        )
        assert nothing is None and last.shape == (3, VOCAB)
        for cache, ids in zip(batch, prompts, strict=True):
            cache.advance(len(ids))
        widths = [8, 1, 3]
        steps = [tokens(n, seed=100 + n) for n in widths]
        logits, taps = target(torch.cat(steps), list(zip(batch, widths, strict=True)), TAPS)
    start = 0
    for index, (prompt, step) in enumerate(zip(prompts, steps, strict=True)):
        cache = target.new_cache()
        assert near(target, last[index], run(target, cache, prompt)[0][-1])
        expected, expected_taps = run(target, cache, step)
        rows = slice(start, start + len(step))
        assert near(target, logits[rows], expected)
        assert near(target, taps[rows], expected_taps)
        start += len(step)


@pytest.mark.parametrize("kept", range(9))
def test_every_accepted_length_rolls_back_to_a_run_of_the_kept_tokens(
    target: TransformersTarget, kept: int
) -> None:
    prompt, block, after = tokens(11), tokens(8, seed=1), tokens(4, seed=2)
    cache, clean = target.new_cache(), target.new_cache()
    run(target, cache, prompt)
    run(target, cache, block, keep=kept)
    run(target, clean, torch.cat((prompt, block[:kept])))
    assert cache.length == clean.length == 11 + kept
    for ours, theirs in zip(keys_and_values(cache), keys_and_values(clean), strict=True):
        assert ours.shape == theirs.shape
        assert near(target, ours, theirs)
    for ours, theirs in zip(run(target, cache, after), run(target, clean, after), strict=True):
        assert near(target, ours, theirs)


def keys_and_values(cache: AdaptedCache) -> list[Tensor]:
    return [tensor for layer in cache.states.layers for tensor in (layer.keys, layer.values)]


def test_the_comparison_would_show_a_rollback_that_is_one_off(target: TransformersTarget) -> None:
    cache, clean = target.new_cache(), target.new_cache()
    run(target, cache, tokens(11))
    run(target, cache, tokens(8, seed=1), keep=4)
    run(target, clean, torch.cat((tokens(11), tokens(8, seed=1)[:3])))
    assert not near(target, run(target, cache, tokens(1))[0], run(target, clean, tokens(1))[0])


def test_a_pass_that_is_never_committed_leaves_no_trace(target: TransformersTarget) -> None:
    cache, clean = target.new_cache(), target.new_cache()
    for each in (cache, clean):
        run(target, each, tokens(6))
    with torch.inference_mode():
        target(tokens(5, seed=3), [(cache, 5)])
    assert torch.equal(run(target, cache, tokens(3, seed=4))[0], run(target, clean, tokens(3, seed=4))[0])
    assert states.fault(cache.states, 9) is None


def test_a_pass_that_fails_behind_its_layers_leaves_no_trace(target: TransformersTarget) -> None:
    """The engine makes it again, and only who fails alone has failed."""

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    for before in (0, 6):
        cache, clean = target.new_cache(), target.new_cache()
        if before:
            for each in (cache, clean):
                run(target, each, tokens(before))
        hook = target.model.get_output_embeddings().register_forward_pre_hook(fail)
        with torch.inference_mode(), pytest.raises(RuntimeError, match="out of memory"):
            target(tokens(5, seed=3), [(cache, 5)])
        hook.remove()
        assert torch.equal(run(target, cache, tokens(3, seed=4))[0], run(target, clean, tokens(3, seed=4))[0])
        assert states.fault(cache.states, before + 3) is None


def test_project_gives_the_models_own_logits(target: TransformersTarget) -> None:
    """With soft-capping and factors: what a draft without a head of its own is given."""
    with torch.inference_mode():
        hidden = target.model.base_model(input_ids=tokens(9)[None]).last_hidden_state[0]
        expected = target.model(input_ids=tokens(9)[None]).logits[0]
        assert near(target, target.project(hidden), expected)
        if target.config.tie_word_embeddings:
            assert near(target, hidden @ target.embedding_weight.T, expected)
        assert torch.equal(target.embed(tokens(9)), target.embedding_weight[tokens(9)])
        assert target.embed(tokens(9)).dtype == target.dtype


def test_only_a_plain_matrix_counts_as_tied(target: TransformersTarget) -> None:
    assert target.config.tie_word_embeddings == (
        target.config.architecture in ("GPT2LMHeadModel", "BloomForCausalLM")
    )


def test_sizes_and_what_is_said_of_it(target: TransformersTarget) -> None:
    import transformers

    config = target.config
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (VOCAB, HIDDEN, LAYERS)
    assert config.max_position_embeddings == 128
    assert target.runs_through == (
        f"transformers {transformers.__version__} ({config.architecture}), one forward per request"
    )
    assert isinstance(target, Target)


def test_hidden_states_in_place_of_logits(target: TransformersTarget) -> None:
    if "output head" in target.refuses_to_lend:
        pytest.skip("the head is not lent")
    logits, _ = target(tokens(5), [(target.new_cache(), 5)])
    hidden, taps = target(tokens(5), [(target.new_cache(), 5)], (0,), "hidden")
    assert taps is not None
    assert torch.allclose(target.project(hidden), logits, atol=1e-4, rtol=1e-4)


def test_misuse_is_refused(target: TransformersTarget) -> None:
    cache = target.new_cache()
    with pytest.raises(ConfigError, match=r"segments of \[2\] rows"):
        target(tokens(3), [(cache, 2)])
    with pytest.raises(ConfigError, match="'all', 'last' or 'hidden'"):
        target(tokens(3), [(cache, 3)], logits="first")
    with pytest.raises(ConfigError, match=f"layer {LAYERS - 1} cannot be tapped"):
        target(tokens(3), [(cache, 3)], (LAYERS - 1,))
    run(target, cache, tokens(3), keep=1)
    with pytest.raises(CapacityError, match="cannot commit 1 rows at length 1"):
        cache.advance(1)


def test_short_dtypes_load(tmp_path: Path) -> None:
    path = write(tmp_path, "gpt2")
    exact, _ = run(target := load_target(path), target.new_cache(), tokens(20))
    short, taps = run(target := load_target(path, dtype=torch.bfloat16), target.new_cache(), tokens(20))
    assert short.dtype == taps.dtype == target.dtype == torch.bfloat16
    assert (short - exact).abs().mean() < 0.1 * exact.abs().mean()
