"""Tokens per second with and without the draft, and of transformers' own generation, in one process.

    python benchmarks/whole.py [--model tiny|smollm2] [--turns 7] [--batches 1 8] [--dtype float32]

The sides take turns on the same prompts; a cell is the median over turns with its quartiles. Both of ours
run on the same engine with the same kernels; transformers runs in float32 on the same weights and
threads, batch 1, temperature 0.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from functools import partial

import torch

from dspark import DSparkDecoder, SamplingParams
from dspark.pretrained import resolve
from dspark.result import pooled_acceptance_length
from measure import Sample, interleaved, machine
from pairs import PAIRS, Pair


def generate(decoder: DSparkDecoder, prompts: list[list[int]], params: SamplingParams) -> object:
    return decoder.generate(prompts, params)


def transformers_side(pair: Pair, prompt: list[int]) -> Callable[[], object]:
    """Greedy generation by transformers, float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(resolve(pair.target, "target"), dtype=torch.float32).eval()
    ids = torch.tensor([prompt])

    def run() -> object:
        with torch.inference_mode():
            return model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=pair.tokens,
                min_new_tokens=pair.tokens,
                pad_token_id=0,
            )

    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(PAIRS), default="tiny")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.0, 0.7])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--block-size", type=int, default=None)
    parser.add_argument("--no-transformers", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    pair = PAIRS[options.model]
    print(machine())
    print(f"{options.model}, {options.dtype}, {pair.tokens} tokens per request, {options.turns} turns\n")
    common = {"dtype": options.dtype, "device": "cpu"}
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(DSparkDecoder.from_pretrained(pair.target, **common))
        draft = stack.enter_context(
            DSparkDecoder.from_pretrained(
                pair.target, pair.draft, block_size=options.block_size, **common, **pair.options
            )
        )
        print(f"{'batch':>5} {'T':>4} {'draft, tok/s':>26} {'plain, tok/s':>26} {'ratio':>6} {'accepted':>8}")
        for batch in options.batches:
            for temperature in options.temperatures:
                cell(options, pair, plain, draft, batch, temperature)
        if not options.no_transformers:
            against_transformers(options, pair, plain, draft)


def cell(
    options: argparse.Namespace,
    pair: Pair,
    plain: DSparkDecoder,
    draft: DSparkDecoder,
    batch: int,
    temperature: float,
) -> None:
    prompts = [pair.ids(draft, i) for i in range(batch)]
    params = SamplingParams(temperature=temperature, max_tokens=pair.tokens, ignore_eos=True, seed=3)
    results = draft.generate(prompts, params)
    sides = {
        "draft": partial(generate, draft, prompts, params),
        "plain": partial(generate, plain, prompts, params),
    }
    times = interleaved(sides, options.turns, warmup=1)
    ratio = times["plain"].median / times["draft"].median
    tau = pooled_acceptance_length(results)
    tokens = batch * pair.tokens
    print(
        f"{batch:5} {temperature:4} {speed(times['draft'], tokens):>26} {speed(times['plain'], tokens):>26} "
        f"{ratio:6.2f} {tau:8.2f}"
    )


def speed(sample: Sample, tokens: int) -> str:
    """Tokens per second: median and quartiles."""
    low, high = sample.spread
    return f"{tokens / sample.median:.1f} [{tokens / high:.1f}, {tokens / low:.1f}]"


def against_transformers(
    options: argparse.Namespace, pair: Pair, plain: DSparkDecoder, draft: DSparkDecoder
) -> None:
    prompt = pair.ids(draft)
    params = SamplingParams(temperature=0.0, max_tokens=pair.tokens, ignore_eos=True)
    sides = {
        "with draft": partial(generate, draft, [prompt], params),
        "plain": partial(generate, plain, [prompt], params),
        "transformers": transformers_side(pair, prompt),
    }
    times = interleaved(sides, options.turns, warmup=1)
    print("\nfirst prompt, batch 1, temperature 0 (transformers always float32)")
    for name, sample in times.items():
        ratio = times["transformers"].median / sample.median
        print(f"{name:>14} {speed(sample, pair.tokens):>26} tok/s {ratio:6.2f}x transformers")


if __name__ == "__main__":
    main()
