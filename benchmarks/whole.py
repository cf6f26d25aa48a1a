"""Tokens per second with and without the draft, and of transformers' own generation.

    python benchmarks/whole.py [--model tiny|smollm2] [--turns 7] [--batches 1 8] [--dtype auto]

dspark with and without the draft runs on one engine and takes turns on the same eight prompts, `batch` at a
time; the engine keeps their prefixes of a page or more. A cell is the median over turns with its quartiles.
transformers (float32, batch 1, temperature 0) takes turns with them from a process of its own; there every
run has a prompt that was not asked before, because transformers keeps nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count

import torch

from dspark import DSparkDecoder, SamplingParams
from dspark.pretrained import resolve
from dspark.result import GenerationResult, pooled_acceptance_length
from measure import Sample, interleaved, machine
from pairs import PAIRS, Pair
from transformers_side import start as start_transformers


def generate(
    decoder: DSparkDecoder, prompts: list[list[int]], params: SamplingParams, batch: int
) -> list[GenerationResult]:
    """All prompts, `batch` at a time."""
    results: list[GenerationResult] = []
    for start in range(0, len(prompts), batch):
        results += decoder.generate(prompts[start : start + batch], params)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(PAIRS), default="tiny")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.0, 0.7])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--block-size", type=int, default=None)
    parser.add_argument("--no-transformers", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    pair = PAIRS[options.model]
    print(machine())
    block_size = pair.block_size if options.block_size is None else options.block_size
    with DSparkDecoder.from_pretrained(
        pair.target,
        pair.draft,
        device="cpu",
        dtype=options.dtype,
        policy="fixed",
        block_size=block_size,
    ) as decoder:
        info = decoder.info()
        print(
            f"{options.model}: target {info['dtype']}, draft {info['draft_dtype']}, block size {block_size}, "
            f"{pair.tokens} tokens per request, {options.turns} turns\n"
        )
        print(f"{'batch':>5} {'T':>4} {'draft, tok/s':>26} {'plain, tok/s':>26} {'ratio':>6} {'accepted':>8}")
        for batch in options.batches:
            for temperature in options.temperatures:
                cell(options, pair, decoder, batch, temperature)
        if not options.no_transformers:
            against_transformers(options, pair, decoder)


def cell(
    options: argparse.Namespace, pair: Pair, decoder: DSparkDecoder, batch: int, temperature: float
) -> None:
    prompts = [pair.ids(decoder, i) for i in range(len(pair.prompts))]
    params = SamplingParams(temperature=temperature, max_tokens=pair.tokens, ignore_eos=True, seed=3)
    results = generate(decoder, prompts, params, batch)
    times = interleaved(ours(decoder, prompts, params, batch), options.turns, warmup=1)
    ratio = times["plain"].median / times["draft"].median
    tau = pooled_acceptance_length(results)
    tokens = len(prompts) * pair.tokens
    print(
        f"{batch:5} {temperature:4} {speed(times['draft'], tokens):>26} {speed(times['plain'], tokens):>26} "
        f"{ratio:6.2f} {tau:8.2f}"
    )


def speed(sample: Sample, tokens: int) -> str:
    """Tokens per second: median and quartiles."""
    low, high = sample.spread
    return f"{tokens / sample.median:.1f} [{tokens / high:.1f}, {tokens / low:.1f}]"


def ours(
    decoder: DSparkDecoder, prompts: list[list[int]], params: SamplingParams, batch: int
) -> dict[str, Callable[[], object]]:
    """Both sides on one engine."""
    plain = replace(params, speculative=False)
    return {
        "draft": partial(generate, decoder, prompts, params, batch),
        "plain": partial(generate, decoder, prompts, plain, batch),
    }


def never_asked(prompt: list[int]) -> Iterator[list[int]]:
    """The prompt after a different token each time, so that what is kept of one is of no use to the next."""
    return ([first, *prompt] for first in count(100))  # after the special tokens, within any vocabulary


def against_transformers(options: argparse.Namespace, pair: Pair, decoder: DSparkDecoder) -> None:
    prompts = never_asked(pair.ids(decoder))
    params = SamplingParams(temperature=0.0, max_tokens=pair.tokens, ignore_eos=True)
    plain = replace(params, speculative=False)
    theirs = start_transformers(resolve(pair.target, "target"), pair.tokens, options.threads)
    sides: dict[str, Callable[[], object]] = {
        "draft": lambda: decoder.generate(next(prompts), params),
        "plain": lambda: decoder.generate(next(prompts), plain),
        "transformers": lambda: theirs(next(prompts)),
    }
    times = interleaved(sides, options.turns, warmup=1)
    print("\nfirst prompt behind a new token, batch 1, temperature 0 (transformers always float32)")
    for name, sample in times.items():
        ratio = times["transformers"].median / sample.median
        print(f"{name:>14} {speed(sample, pair.tokens):>26} tok/s {ratio:6.2f}x transformers")


if __name__ == "__main__":
    main()
