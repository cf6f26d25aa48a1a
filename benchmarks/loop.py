"""What a round costs outside the models' passes, at batch 1.

    python benchmarks/loop.py [--model tiny|smollm2] [--turns 20]

By the engine's own clock: time in whole rounds minus the time in draft and target passes. The Markov
chain counts as drafting and is shown beside it. Policy "fixed", at temperature 0 and 0.7.
"""

from __future__ import annotations

import argparse
import statistics

import torch

from dspark import DSparkDecoder, SamplingParams
from measure import machine
from pairs import PAIRS, Pair

PASSES = ("prefill_s", "draft_s", "chain_s", "verify_s")
TIMES = (*PASSES, "accept_s", "round_s")


def overheads(
    decoder: DSparkDecoder, prompt: list[int], params: SamplingParams, turns: int
) -> list[dict[str, float]]:
    """Microseconds per round of each phase, one entry per turn."""
    rows = []
    for turn in range(turns + 2):
        before = decoder.stats()
        decoder.generate(prompt, params)
        after = decoder.stats()
        rounds = after["passes"] - before["passes"]
        spent = {name: (after[name] - before[name]) / rounds * 1e6 for name in TIMES}
        spent["outside"] = spent["round_s"] - sum(spent[name] for name in PASSES)
        if turn >= 2:
            rows.append(spent)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(PAIRS), default="tiny")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(machine())
    pair: Pair = PAIRS[options.model]
    with DSparkDecoder.from_pretrained(pair.target, pair.draft, policy="fixed") as decoder:
        print(f"{options.model}, {decoder.info()['dtype']}, rejection, batch 1; µs per round, medians\n")
        print(
            f"{'temperature':11} {'round':>9} {'draft':>9} {'chain':>9} {'verify':>9} {'accept':>9}   outside"
        )
        for temperature in (0.0, 0.7):
            params = SamplingParams(temperature=temperature, max_tokens=pair.tokens, seed=1, ignore_eos=True)
            rows = overheads(decoder, pair.ids(decoder), params, options.turns)
            cell = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
            quartiles = statistics.quantiles([row["outside"] for row in rows], n=4)
            print(
                f"{temperature:<11} {cell['round_s']:9.0f} {cell['draft_s']:9.0f} {cell['chain_s']:9.1f} "
                f"{cell['verify_s']:9.0f} {cell['accept_s']:9.1f} "
                f"{cell['outside']:9.1f} [{quartiles[0]:.1f}, {quartiles[2]:.1f}]"
            )


if __name__ == "__main__":
    main()
