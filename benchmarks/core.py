"""The core's acceptance rule against the same rule in plain torch.

    python benchmarks/core.py [--vocabulary 151936] [--gamma 7] [--turns 41] [--quick]

Both sides get the same logits, drafts and uniform numbers and must give the same answer: the core in one call
for the batch, torch request by request. "read" is the time to sum the touched rows with torch: what memory
alone costs.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch import Tensor

from dspark import SamplingParams
from dspark.core import Noise, Uniforms, accept_batch
from measure import interleaved, keep_freed_memory, machine


def torch_rejection(
    target: Tensor, ids: Tensor, draft: Tensor, u: Tensor, v: Tensor, temperature: float
) -> tuple[int, int]:
    """Speculative sampling as a torch user writes it: softmax of all rows, one comparison, one draw."""
    p = torch.softmax(target.float() / temperature, dim=-1)
    q = torch.softmax(draft.float() / temperature, dim=-1)
    ratio = p[:-1].gather(1, ids[:, None])[:, 0] / q.gather(1, ids[:, None])[:, 0]
    rejected = (u >= ratio).nonzero()
    accepted = int(rejected[0]) if len(rejected) else len(ids)
    row = p[accepted] if accepted == len(ids) else torch.clamp(p[accepted] - q[accepted], min=0.0)
    cdf = torch.cumsum(row, dim=-1)
    token = int(torch.searchsorted(cdf, v[accepted] * cdf[-1], right=True))
    return accepted, min(token, row.shape[0] - 1)


def case(
    gamma: int, vocabulary: int, accept_all: bool, dtype: torch.dtype, seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Logits on a target's scale with drafts that are all accepted, or of which the first is rejected."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(gamma + 1, vocabulary, generator=generator) * 3
    draft = target[:-1] + torch.randn(gamma, vocabulary, generator=generator)
    ids = torch.softmax(draft, dim=-1).multinomial(1, generator=generator)[:, 0]
    u = torch.zeros(gamma) if accept_all else torch.full((gamma,), 0.999999)
    if not accept_all:
        target[0, ids[0]] = draft[0, ids[0]] - 5
    v = torch.rand(gamma + 1, generator=generator)
    return target.to(dtype), ids, draft.to(dtype), u, v


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--gamma", type=int, default=7)
    parser.add_argument("--turns", type=int, default=41)
    parser.add_argument("--quick", action="store_true", help="batch 1 only")
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(2)
    print(machine())
    print(f"gamma {options.gamma}, vocabulary {options.vocabulary}, temperature 1, {options.turns} turns\n")
    print(f"{'case':44} {'core':>34} {'torch':>34} {'torch/core':>10} {'read':>9}")
    for batch in (1,) if options.quick else (1, 8, 64):
        for rule, dtype, top_p in (
            ("rejection", torch.float32, 1.0),
            ("rejection", torch.bfloat16, 1.0),
            ("rejection", torch.float32, 0.95),
            ("block", torch.float32, 1.0),
            ("coupled", torch.float32, 1.0),
        ):
            for accept_all in (False, True):
                row(options, batch, rule, dtype, top_p, accept_all)


def row(
    options: argparse.Namespace, batch: int, rule: str, dtype: torch.dtype, top_p: float, accept_all: bool
) -> None:
    cases = [
        case(options.gamma, options.vocabulary, accept_all, dtype, seed) for seed in range(min(batch, 8))
    ]
    batch_cases = [cases[i % len(cases)] for i in range(batch)]
    targets, drafts = torch.cat([c[0] for c in batch_cases]), torch.cat([c[2] for c in batch_cases])
    ids = [c[1].tolist() for c in batch_cases]
    params = [SamplingParams(temperature=1.0, top_p=top_p)] * batch
    noises: list[Noise | Uniforms] = [
        Noise(i, 100) if rule == "coupled" else Uniforms(accept=c[3].tolist(), resample=c[4].tolist())
        for i, c in enumerate(batch_cases)
    ]

    def core() -> list[tuple[int, int]]:
        return accept_batch(targets, ids, drafts, rule, params, noises)

    def plain() -> list[tuple[int, int]]:
        return [torch_rejection(*c, 1.0) for c in batch_cases]

    answers = core()
    touched = answers[0][0] + 1
    rows = [(t[:touched], d[: min(touched, options.gamma)]) for t, _, d, _, _ in batch_cases]

    def read() -> float:
        return float(sum(t.sum() + d.sum() for t, d in rows))

    comparable = rule == "rejection" and top_p == 1.0
    if comparable and not np.array_equal([a for a, _ in answers], [a for a, _ in plain()]):
        raise SystemExit("the two sides disagree")
    turns = max(5, options.turns // batch)
    sides = {"core": core, "torch": plain, "read": read}
    times = interleaved(sides, turns, repeats=10 if batch == 1 else 1)
    name = f"batch {batch:2} {rule:9} {str(dtype)[6:]:8} top_p {top_p:<4} " + (
        "all kept" if accept_all else "1st rejected"
    )
    ratio = times["torch"].median / times["core"].median
    note = f"{ratio:9.1f}x" if comparable else " " * 10
    print(
        f"{name:44} {times['core']!s:>34} {times['torch']!s:>34} {note} {times['read'].median * 1e3:6.2f} ms"
    )


if __name__ == "__main__":
    main()
