"""Above temperature 0: do the tokens follow the reference's distributions?

Each emitted token x becomes a number u = F(x-) + v p(x): p its probability in the reference, F(x-) the
probability of what comes before it in some fixed order of the vocabulary, v a fresh uniform number. If
every token is drawn from p given the text before it, the u are uniform and independent, whatever the text.
Two orders are used. In the order of falling probability, a distribution too sharp or too flat, such as a
draft's, moves all numbers one way; in the order of token ids, a faulty inverse distribution function does.

The tokens after a wholly accepted block (bonus tokens) are tested again on their own: they are few, and drawn
by a separate path. Which tokens these are depends only on what came before them, so they are uniform too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dspark.audit import statistics as st
from dspark.audit.checks import Counts, Planted, SampledCheck, Test
from dspark.audit.reference import Reference, law
from dspark.progress import Progress
from dspark.result import GenerationResult

ORDERS = ("falling probability", "token id")
KINDS = ("too sharp (argmax)", "too flat (temperature doubled)")
TESTS_PER_CHECK = 3 * len(ORDERS)
ENOUGH = 50
"""Fewer numbers than this are not tested."""


@dataclass(frozen=True, slots=True)
class Law:
    """What the tokens of a run are drawn from."""

    name: str
    temperature: float = 1.0
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The transforms of one sequence: columns are `ORDERS`, or `KINDS` for planted faults."""

    emitted: st.Numbers
    is_bonus: NDArray[np.bool_]
    planted: st.Numbers
    planted_distance: st.Numbers
    impossible: int


def check_sampled(
    results: Sequence[GenerationResult],
    reference: Reference,
    law_of_run: Law,
    faults: Sequence[str],
    level: float,
    generator: np.random.Generator,
    progress: Progress,
) -> SampledCheck:
    """Tests the results of one run; each test fails a correct engine with probability `level`."""
    numbers = []
    for done, result in enumerate(results, 1):
        if result.token_ids:
            numbers.append(_transform(result, reference, law_of_run, generator))
        progress(f"reference, {law_of_run.name}", done, len(results))
    return SampledCheck(
        name=law_of_run.name,
        counts=Counts.of(results),
        tests=tuple(_tests(numbers, level)),
        planted=tuple(_power(numbers, level, generator)),
        impossible=sum(n.impossible for n in numbers),
        faults=tuple(faults),
    )


def _transform(
    result: GenerationResult, reference: Reference, drawn: Law, generator: np.random.Generator
) -> _Numbers:
    rows = reference.rows(result.prompt_token_ids, result.token_ids)
    p = law(rows, drawn.temperature, drawn.top_p)
    emitted = torch.tensor(result.token_ids)
    flat = p.sqrt() / p.sqrt().sum(-1, keepdim=True)
    wrong_laws = (torch.zeros_like(p).scatter_(-1, p.argmax(-1, keepdim=True), 1.0), flat)
    # A token at the edge of top-p may stand on either side of it by rounding.
    bounds = torch.tensor([[reference.bound(row)] for row in rows], dtype=rows.dtype)
    generous = law(rows.scatter_add(-1, emitted[:, None], bounds), drawn.temperature, drawn.top_p)
    return _Numbers(
        emitted=np.stack([_places(p, emitted, order, generator) for order in ORDERS], axis=1),
        is_bonus=_bonus(result),
        planted=np.stack([_places(p, _draw(q, generator), ORDERS[0], generator) for q in wrong_laws], axis=1),
        planted_distance=np.stack([((q - p).abs().sum(-1) / 2).numpy() for q in wrong_laws], axis=1),
        impossible=int((generous.gather(-1, emitted[:, None]) == 0).sum()),
    )


def _places(p: Tensor, tokens: Tensor, order: str, generator: np.random.Generator) -> st.Numbers:
    """The randomised transform of `tokens` `[n]` under `p` `[n, vocabulary]`."""
    own = p.gather(-1, tokens[:, None])
    ids = torch.arange(p.shape[1])
    before = ids < tokens[:, None]
    if order == ORDERS[0]:
        before = (p > own) | ((p == own) & before)
    mass = (p * before).sum(-1).numpy() + generator.random(len(tokens)) * own[:, 0].numpy()
    return np.asarray(np.clip(mass, 0.0, 1.0), dtype=np.float64)


def _draw(p: Tensor, generator: np.random.Generator) -> Tensor:
    """One token of each distribution `[n, vocabulary]`, by inverse distribution function."""
    sums = p.cumsum(-1)
    aim = torch.from_numpy(generator.random(len(p)))[:, None] * sums[:, -1:]
    return torch.searchsorted(sums, aim, right=True)[:, 0].clamp(max=p.shape[1] - 1)


def _bonus(result: GenerationResult) -> NDArray[np.bool_]:
    """Which tokens came after a block that was accepted whole (of length 0, too)."""
    marks = np.zeros(len(result.token_ids), dtype=bool)
    end = 1  # the prefill's own token
    for r in result.rounds:
        end += r.committed
        if r.accepted == r.verified and r.committed == r.accepted + 1 and end <= len(marks):
            marks[end - 1] = True
    return marks


def _tests(numbers: Sequence[_Numbers], level: float) -> Iterable[Test]:
    for column, order in enumerate(ORDERS):
        everything = np.concatenate([n.emitted[:, column] for n in numbers]) if numbers else np.empty(0)
        bonus = np.concatenate([n.emitted[n.is_bonus, column] for n in numbers]) if numbers else np.empty(0)
        for name, sample in (("all tokens", everything), ("bonus tokens", bonus)):
            if (count := len(sample)) >= ENOUGH:
                distance = st.ks_distance(sample)
                p_value = st.ks_p_value(distance, count)
                yield Test(
                    f"distance, {name}, by {order}",
                    count,
                    distance,
                    p_value,
                    level,
                    st.ks_detectable(count, level),
                )
        pairs = [np.stack([n.emitted[:-1, column], n.emitted[1:, column]], axis=1) for n in numbers]
        if (count := sum(map(len, pairs))) >= ENOUGH:
            correlation = st.lag_correlation(np.concatenate(pairs))
            p_value = st.lag_p_value(correlation, count)
            yield Test(
                f"lag-1 correlation, by {order}",
                count,
                correlation,
                p_value,
                level,
                st.lag_detectable(count, level),
            )


def _power(numbers: Sequence[_Numbers], level: float, generator: np.random.Generator) -> Iterable[Planted]:
    if sum(len(n.planted) for n in numbers) < ENOUGH:
        return  # nothing is tested, so nothing would be caught
    planted = np.concatenate([n.planted for n in numbers])
    distance = np.concatenate([n.planted_distance for n in numbers]).mean(axis=0)
    is_caught = partial(_is_caught, limit=st.ks_limit(len(planted), level))
    for column, kind in enumerate(KINDS):
        share = st.smallest_caught_share(planted[:, column], is_caught, generator)
        yield Planted(kind, share, None if share is None else share * float(distance[column]))


def _is_caught(sample: st.Numbers, limit: float) -> bool:
    return st.ks_distance(sample) > limit
