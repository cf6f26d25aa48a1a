"""Verify sampling through the emulation decides as the core does, bit by bit, and says where it might not."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast
from unittest.mock import Mock

import pytest
import scipy.stats
import torch
from test_cuda_noise import philox

from cuda_host import Library, library, needs_compiler
from cuda_sampling import FAULTS, PARAMS, STYLES, Batch, batch, neutral, planted, run, under, with_faults
from dspark import _core
from dspark.errors import NumericsError, RequestError
from dspark.kernels import Choice
from dspark.kernels.sampler import sampling_role

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
RULES = ("rejection", "coupled")


@pytest.fixture(scope="module", autouse=True)
def emulation() -> Library:
    needs_compiler()
    return library()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", [1, 5, 33, 1023, 1024, 2500])
def test_decisions_are_the_cores(emulation: Library, vocabulary: int, dtype: torch.dtype, rule: str) -> None:
    seed = vocabulary + DTYPES.index(dtype)
    style = STYLES[seed % len(STYLES)] if vocabulary > 5 else "wild"
    made = batch(seed, vocabulary, dtype, style=style, rule=rule, params=usable(vocabulary))
    wrong, close = made.differences(rule, emulation)
    assert wrong == 0
    assert close <= (len(made.ids) if style in ("equal", "zeros", "ties") else 1)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("style", STYLES)
def test_rows_of_every_kind(emulation: Library, style: str, rule: str) -> None:
    """Ties, holes, one token alone, zeros of both signs, rows without any difference."""
    wrong, _ = batch(7, 1300, torch.float32, style=style, rule=rule).differences(rule, emulation, 128)
    assert wrong == 0


def usable(vocabulary: int) -> list[dict[str, Any]]:
    """Parameters under which something is left to draw."""
    masks = [given for given in PARAMS if "logit_bias" in given or "min_tokens" in given]
    return [given for given in PARAMS if vocabulary > 4 or given not in masks]


@pytest.mark.long
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("style", STYLES)
def test_a_wider_grid(emulation: Library, style: str, dtype: torch.dtype, rule: str) -> None:
    for seed, vocabulary in enumerate([17, 700, 1025, 3072, 5000]):
        wrong, _ = batch(seed, vocabulary, dtype, style=style, rule=rule, most=7).differences(rule, emulation)
        assert wrong == 0, vocabulary


def test_close_decisions_are_rare(emulation: Library) -> None:
    """The bound is one of rounding: on rows without ties none of hundreds of decisions is within it."""
    params = [{"top_p": 0.9, "temperature": 0.7 + 0.01 * i} for i in range(150)]
    for rule in RULES:
        made = batch(3, 257, torch.float32, rule=rule, params=params)
        assert made.differences(rule, emulation, 32) == (0, 0)


def test_rows_from_which_nothing_can_be_drawn(emulation: Library) -> None:
    """Their request fails as in the core, if it comes to them; the others go on."""
    for bad, words in (
        (torch.nan, "a NaN"),
        (torch.inf, "plus infinity"),
        (None, "no candidate above minus infinity"),
    ):
        for at in range(3):
            made = batch(11, 1100, torch.float32, params=[{}] * 4, most=0)
            target = torch.cat([made.target[:1], made.target])
            draft = target[:1].clone()
            ids = [[int(target[0].argmax())], [], [], []]
            if bad is None:
                target[at] = -torch.inf
            else:
                target[at, 1050] = bad
            judged = Batch(target, draft, ids, made.params, made.noise, made.history)
            [core] = [one for one in judged.by_core("rejection") if isinstance(one, NumericsError)]
            with pytest.raises(NumericsError) as kernel:
                judged.by_kernel("rejection", emulation)
            assert str(kernel.value) == str(core) and words in str(core)
    # A masked logit covers nothing up.
    made = batch(12, 40, torch.float32, params=[{"min_tokens": 9, "stop_token_ids": [3]}], most=0)
    made.target[0, 3] = torch.nan
    with pytest.raises(NumericsError, match="a NaN"):
        made.by_kernel("rejection", emulation)


def test_what_the_kernels_do_not_serve_is_refused() -> None:
    made = batch(1, 20, torch.float32, params=[{}], most=0)

    def refused(rule: str = "rejection", **changed: Any) -> str:
        given = {"target": made.target, "draft": made.draft, "ids": made.ids, "params": made.params} | changed
        with pytest.raises(RequestError) as error:
            _core.VerifyPlan(
                given["target"], given["ids"], given["draft"], rule, given["params"], made.noise, made.history
            )
        return str(error.value)

    assert "judged on the host" in refused("block")
    assert "log-probabilities" in refused(params=[neutral(logprobs=1)])
    assert "float64" in refused(target=made.target.double())
    assert "outside of the vocabulary" in refused(target=made.target.repeat(2, 1), ids=[[20]])
    assert "rows of draft logits" in refused(target=made.target.repeat(2, 1), ids=[[1]])
    assert "there are 1 rows" in refused(ids=[[1, 2]])


def test_limits_of_the_kernels_are_told_when_the_role_is_given() -> None:
    """The core takes over there, instead of a failure in a pass."""
    kernels = Choice(cast(Any, Mock(prepare=lambda entries: None)))
    given: dict[str, Any] = {"dtypes": {torch.bfloat16}, "rank": 256, "vocabulary": 2**20 - 1, "gamma": 63}
    assert sampling_role(kernels, **given).startswith("kernel")
    for name, value, words in (
        ("rank", 1025, "rank 1025"),
        ("vocabulary", 2**20, "rows have 1048576 logits"),
        ("gamma", 64, "blocks have 65 rows"),
        ("dtypes", {torch.float64}, "float64"),
    ):
        role = sampling_role(kernels, **{**given, name: value})
        assert role.startswith("core: ") and words in role


def test_as_many_equal_logits_as_the_sums_hold(emulation: Library) -> None:
    """2^44 units each of them, in 64 bits: one more column is refused."""
    row, more = (torch.zeros(1, 2**20 - less, dtype=torch.float16) for less in (1, 0))
    made = Batch(row, row[:0], [[]], [neutral(top_p=0.5)], [_core.Noise(1, 1)], [([], [])])
    assert made.differences("rejection", emulation, 32) == (0, 0)
    made.target, made.draft = more, more[:0]
    with pytest.raises(RequestError, match="expected 1 to 1048575 columns, found 1048576"):
        made.by_kernel("rejection", emulation)


def chi_square(counts: Counter[int], law: torch.Tensor) -> float:
    total = sum(counts.values())
    observed = [counts[token] for token in range(len(law))]
    return float(scipy.stats.chisquare(observed, (law.double() / law.double().sum() * total).tolist()).pvalue)


def draws(launcher: Library, runs: int = 3000, **given: Any) -> tuple[Counter[int], torch.Tensor]:
    """First tokens of rounds that draft one token by the chain's kernels and judge it; the target's law."""
    generator = torch.Generator().manual_seed(5)
    target, base = torch.randn(2, 1, 6, generator=generator)
    params = [neutral(**given)] * runs
    noise = [_core.Noise(0x9E3779B97F4A7C15 * run % 2**64, 9) for run in range(runs)]
    history: list[tuple[list[int], list[int]]] = [([], [])] * runs
    rows = base.repeat(runs, 1)
    chain = _core.ChainPlan([0] * runs, rows, None, {}, "rejection", params, noise, history, gamma=1)
    outcome, table, scratch = run(chain, launcher, [rows], 32)
    ids = [tokens for tokens, _ in chain.read(outcome)]
    logits = target.repeat(2 * runs, 1)
    plan = _core.VerifyPlan(
        logits,
        ids,
        (chain, table.data_ptr(), scratch.data_ptr(), list(range(runs))),
        "rejection",
        params,
        noise,
        history,
    )
    outcome, _, _ = run(plan, launcher, [logits, rows, table, scratch], 32)
    counts = Counter(
        drafted[0] if accepted else token
        for drafted, (accepted, token, _) in zip(ids, plan.read(outcome), strict=True)
    )
    return counts, torch.softmax(target[0] / given.get("temperature", 1.0), 0)


def test_draws_have_the_targets_law(emulation: Library) -> None:
    """Chi-square over rounds of chain and verdict; a target a little warmer is told apart."""
    counts, law = draws(emulation)
    assert chi_square(counts, law) > 1e-3
    assert chi_square(counts, law.pow(0.85)) < 1e-6


@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "STALE_TOKEN"])
def test_planted_faults_are_caught(fault: str) -> None:
    """The core's known bugs (rust/src/mutant.rs), as far as the kernels do what they are about: the rule
    "block", the cut and the plan are the host's."""
    params: list[dict[str, Any]] = [{"temperature": 0.8}] * 300
    made = batch(21, 8, torch.float32, params=params, most=2)
    if fault == "TIES_BY_RANK_ONLY":
        made = batch(22, 40, torch.float32, params=[{"top_k": 4}] * 40, style="ties", most=2)
    if fault == "ROUNDED_DRAFT_LAW":
        made = decided_by_rounding()
    assert made.differences("rejection", with_faults(), 32)[0] == 0
    with planted(fault) as faulty:
        assert made.differences("rejection", faulty, 32)[0] > 0


def decided_by_rounding() -> Batch:
    """Drafted tokens whose acceptance would be decided otherwise if q were a bfloat16."""
    target, draft = torch.randn(2, 6, generator=torch.Generator().manual_seed(3))
    p, q = (torch.softmax(row.double(), 0) for row in (target, draft))
    ratios = torch.stack([p / q, p / q.bfloat16().double()])
    gaps = (ratios[0] - ratios[1]).abs().masked_fill(ratios[0] > 0.99, 0)
    token = int(gaps.argmax())
    low, high = sorted(ratios[:, token].tolist())
    assert high - low > 1e-4

    def uniform(seed: int) -> float:
        words = philox((9, 0, 1, 0), (seed, 0))
        return (words[0] << 32 | words[1]) / 2**64

    seeds = [seed for seed in range(20000) if low + 1e-6 < uniform(seed) < high - 1e-6]
    count = len(seeds)
    made = Batch(target.repeat(2 * count, 1), draft.repeat(count, 1), [[token]] * count)
    made.params, made.history = [neutral()] * count, [([], [])] * count
    made.noise = [_core.Noise(seed, 9) for seed in seeds]
    return made


@pytest.mark.parametrize("fault", ["SHARED_STREAM", "REUSED_UNIFORM", "TARGET_ARGMAX"])
def test_planted_faults_bend_the_law(fault: str) -> None:
    with planted(fault) as faulty:
        assert chi_square(*draws(faulty)) < 1e-6


@pytest.mark.parametrize("kind", ["address", "thread"])
def test_under_sanitizers(kind: str) -> None:
    """Small blocks of threads over a vocabulary of more than one tile."""
    given = [{"top_k": 9, "top_p": 0.8, "repetition_penalty": 1.3}, {"min_p": 0.1}, {"temperature": 0.0}]
    for rule in RULES:
        made = batch(31, 1100, torch.bfloat16, params=given, most=2, rule=rule)
        assert made.differences(rule, under(kind), 64)[0] == 0
