"""`dspark.core` on its own: acceptance over numpy and torch, plans, cost tables, calibration."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from dspark import ConfigError, NumericsError, RequestError, SamplingParams, _core
from dspark.core import Calibration, CostTable, Noise, Uniforms, accept, accept_batch, plan, threshold_prefix
from dspark.draft import load_draft
from dspark.pretrained import resolve
from dspark.serve.heads import heads_to_core
from places import DATA, RNN_DRAFT

ONE = SamplingParams(temperature=1.0)
RULES = ["rejection", "block", "coupled"]


def block(
    length: int = 3, vocabulary: int = 9, seed: int = 0
) -> tuple[torch.Tensor, list[int], torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(length + 1, vocabulary, generator=generator, dtype=torch.float64)
    draft = target[:length] + 0.5 * torch.randn(length, vocabulary, generator=generator, dtype=torch.float64)
    ids = torch.softmax(draft, -1).multinomial(1, generator=generator)[:, 0].tolist() if length else []
    return target, ids, draft


@pytest.mark.parametrize("rule", RULES)
def test_numpy_and_torch_of_every_dtype_agree(rule: str) -> None:
    for seed in range(20):
        target, ids, draft = (x.bfloat16() if isinstance(x, torch.Tensor) else x for x in block(seed=seed))
        answers = {
            accept(convert(target), ids, convert(draft), rule, ONE, Noise(seed, 7))
            for convert in (
                lambda x: x,
                lambda x: x.float(),
                lambda x: x.double(),
                lambda x: x.half() if x.half().equal(x) else x,
                lambda x: x.float().numpy(),
                lambda x: x.double().numpy(),
                lambda x: torch.stack([x, x], 1)[:, 0],  # rows apart in memory
                lambda x: np.stack([x.float().numpy()] * 2, 1)[:, 1],
            )
        }
        assert len(answers) == 1


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_injected_uniforms_decide(rule: str) -> None:
    target, ids, draft = block()
    keep = Uniforms(accept=[0.0] * 3, resample=[0.0] * 4)
    assert accept(target, ids, draft, rule, ONE, keep) == (3, 0), (
        "u = 0 keeps all; the CDF ascends by token id"
    )
    drop = Uniforms(accept=[1 - 2**-53] * 3, resample=[1 - 2**-53] * 4)
    accepted, token = accept(target, ids, draft, rule, ONE, drop)
    assert accepted < 3 and 0 <= token < 9
    with pytest.raises(RequestError, match="resample"):
        accept(target, ids, draft, rule, ONE, Uniforms(accept=[0.5] * 3, resample=[0.5] * 3))
    with pytest.raises(RequestError, match=r"\[0, 1\)"):
        Uniforms(accept=[1.0])


def test_the_gil_is_free_while_rust_works() -> None:
    """Another thread advances between the start and the end of one long call."""
    target = torch.randn(200, 100_000)
    ids, draft = [0] * 199, torch.randn(199, 100_000)
    beats: list[float] = []
    over = threading.Event()

    def beat() -> None:
        while not over.is_set():
            beats.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=beat)
    thread.start()
    start = time.perf_counter()
    accept(target, ids, draft, "block", ONE, Noise(1, 1))
    end = time.perf_counter()
    over.set()
    thread.join()
    assert len([t for t in beats if start < t < end]) > 3


BAD: list[tuple[str, Any]] = [
    ("rows for these drafts", lambda t, i, d: (t[:3], i, d)),
    ("rows for these drafts", lambda t, i, d: (t, i, d[:1])),
    ("outside of the vocabulary", lambda t, i, d: (t, [0, 1, 9], d)),
    ("float64, float32", lambda t, i, d: (t.long(), i, d)),
    ("contiguous", lambda t, i, d: (t.T.contiguous().T, i, d)),
    ("one or two dimensions", lambda t, i, d: (t[None], i, d)),
    ("may be None only", lambda t, i, d: (t, i, None)),
    ("shape", lambda t, i, d: (t, i, d[:, :5].contiguous())),
]


@pytest.mark.parametrize(("message", "change"), BAD)
def test_shapes_that_do_not_fit_are_refused(message: str, change: Any) -> None:
    target, ids, draft = change(*block())
    with pytest.raises(RequestError, match=message):
        accept(target, ids, draft, "rejection", ONE, Noise(1, 1))


def test_names_and_types_that_do_not_exist_are_refused() -> None:
    target, ids, draft = block()
    with pytest.raises(ConfigError, match="acceptance must be"):
        accept(target, ids, draft, "typical", ONE, Noise(1, 1))
    with pytest.raises(TypeError, match="numpy array"):
        accept([[1.0]], [], None, "rejection", ONE, Noise(1, 1))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_read_must_be_usable(bad: float) -> None:
    target, ids, draft = block()
    target[0, 4] = bad
    with pytest.raises(NumericsError, match="row 0"):
        accept(target, ids, draft, "rejection", ONE, Noise(1, 1))
    target[0] = -torch.inf
    with pytest.raises(NumericsError):
        accept(target, ids, draft, "rejection", ONE, Noise(1, 1))
    target[0, 6] = 1.0  # one token left is enough
    assert accept(target[:1], [], None, "rejection", ONE, Noise(1, 1)) == (0, 6)


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_rows_behind_a_rejection_are_not_read(rule: str) -> None:
    target, ids, draft = block()
    target[0, ids[0]] = -torch.inf  # never accepted
    target[1:] = torch.nan
    accepted, token = accept(target, ids, draft, rule, ONE, Noise(3, 3))
    assert accepted == 0 and token != ids[0]


def test_a_batch_is_its_requests() -> None:
    blocks = [block(length, seed=length) for length in (3, 0, 1, 5)]
    params = [SamplingParams(temperature=t) for t in (1.0, 0.0, 0.6, 1.4)]
    noises: list[Noise | Uniforms] = [Noise(9, position) for position in range(4)]
    together = accept_batch(
        torch.cat([b[0] for b in blocks]),
        [b[1] for b in blocks],
        torch.cat([b[2] for b in blocks]),
        "block",
        params,
        noises,
    )
    alone = [accept(*b, "block", p, n) for b, p, n in zip(blocks, params, noises, strict=True)]
    assert together == alone
    bad = torch.cat([b[0] for b in blocks])
    bad[4] = torch.nan  # the only row of the second
    some = accept_batch(
        bad, [b[1] for b in blocks], torch.cat([b[2] for b in blocks]), "block", params, noises
    )
    assert isinstance(some[1], NumericsError) and "NaN" in str(some[1])
    assert [some[0], *some[2:]] == [alone[0], *alone[2:]]
    with pytest.raises(RequestError, match="params has 1 entries for 2"):
        accept_batch(torch.zeros(2, 4), [[], []], None, "block", [ONE], [Noise(1, 1)] * 2)


def test_penalties_count_the_block_so_far() -> None:
    """Row 1 is penalised for the token that row 0 drafted."""
    target = torch.zeros(2, 4, dtype=torch.float64)
    target[:, 2], target[:, 1] = 5.0, 4.0
    params = SamplingParams(temperature=0.0, presence_penalty=2.0)
    assert accept(target, [2], target[:1], "rejection", params, Noise(1, 1)) == (1, 1)
    assert accept(target, [2], target[:1], "rejection", params, Noise(1, 1), output_ids=[1, 2]) == (1, 2)


@settings(max_examples=200, deadline=None)
@given(
    length=st.integers(0, 5),
    vocabulary=st.integers(1, 40),
    seed=st.integers(0, 2**32),
    rule=st.sampled_from(RULES),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 4.0]),
    top_k=st.integers(0, 45),
    top_p=st.sampled_from([0.1, 0.9, 1.0]),
)
def test_any_block_gives_a_token_that_the_target_may_say(
    length: int, vocabulary: int, seed: int, rule: str, temperature: float, top_k: int, top_p: float
) -> None:
    target, ids, draft = block(length, vocabulary, seed)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    accepted, token = accept(target, ids, draft, rule, params, Noise(seed, 5))
    assert 0 <= accepted <= length and 0 <= token < vocabulary
    row = target[accepted]
    if temperature == 0.0 or top_k == 1:
        assert row[token] == row.max()
    elif top_k:
        assert (row > row[token]).sum() < top_k
    # The same noise gives the same answer.
    assert accept(target, ids, draft, rule, params, Noise(seed, 5)) == (accepted, token)


@pytest.mark.parametrize(("name", "path"), [("draft-vanilla", "tiny-draft"), ("draft-rnn", RNN_DRAFT)])
def test_the_chain_gives_the_reference_blocks(name: str, path: str | Path) -> None:
    golden = load_file(DATA / "qwen3" / name / "golden" / "golden.safetensors")
    draft = load_draft(resolve(path, "draft"), target=None)
    greedy = SamplingParams(temperature=0.0).with_defaults({})
    for suffix in ("", "_2"):
        ids, confidence = _core.draft_chain(
            int(golden[f"anchor_id{suffix}"]),
            golden[f"base_logits{suffix}"],
            golden[f"block_hidden{suffix}"],
            heads_to_core(draft),
            "rejection",
            greedy,
            Noise(1, 1),
        )
        assert ids == golden[f"draft_tokens{suffix}"].tolist()
        tokens = [int(golden[f"anchor_id{suffix}"]), *ids[:-1]]
        steps = _core.step_logits(
            tokens, golden[f"base_logits{suffix}"], golden[f"block_hidden{suffix}"], heads_to_core(draft)
        )
        assert torch.allclose(torch.tensor(steps), golden[f"step_logits{suffix}"], atol=1e-4)
        expected = torch.sigmoid(golden[f"confidence_logits{suffix}"])
        assert torch.allclose(torch.tensor(confidence), expected, atol=1e-5)


def test_every_slot_is_used_and_every_step_reads_the_one_before() -> None:
    """Base logits name a token per slot; the head moves each step by the token that the last one drew."""
    vocabulary, gamma = 12, 5
    base = torch.zeros(gamma, vocabulary)
    base[torch.arange(gamma), torch.arange(gamma) + 2] = 1.0
    zero = {"markov": {"kind": "vanilla", "w1": torch.zeros(vocabulary, 1), "w2": torch.zeros(vocabulary, 1)}}
    greedy = SamplingParams(temperature=0.0).with_defaults({})
    ids, _ = _core.draft_chain(0, base, None, zero, "rejection", greedy, Noise(1, 1))
    assert ids == [2, 3, 4, 5, 6]
    odd = {"markov": zero["markov"] | {"kind": "trigram"}}
    with pytest.raises(ConfigError, match='"vanilla", "gated" or "rnn", not "trigram"'):
        _core.draft_chain(0, base, None, odd, "rejection", greedy, Noise(1, 1))
    successor = torch.eye(vocabulary).roll(1, 0) * 10  # W2 W1[x] is largest at x + 1
    heads = {"markov": {"kind": "vanilla", "w1": torch.eye(vocabulary), "w2": successor}}
    for limit in (1, 3, 5):
        ids, _ = _core.draft_chain(6, base, None, heads, "rejection", greedy, Noise(1, 1), limit=limit)
        assert ids == [7, 8, 9, 10, 11][:limit]


def test_bad_draft_rows_end_the_chain_and_nothing_else() -> None:
    base = torch.randn(4, 6)
    base[2, 1] = torch.nan
    ids, _ = _core.draft_chain(0, base, None, {}, "rejection", ONE.with_defaults({}), Noise(1, 1))
    assert len(ids) == 2


def test_plans() -> None:
    falling = CostTable([(tokens, 1.0 + 0.3 * tokens) for tokens in range(1, 20)])
    assert plan([[0.9, 0.8, 0.7], [0.1, 0.9, 0.9]], falling) == [3, 0]
    flat = CostTable([(1, 0.01)])
    assert plan([[0.9, 0.01], [0.5]], flat) == [2, 1] and plan([[0.9, 0.9]], flat, limits=[1]) == [1]
    with pytest.raises(ConfigError):
        plan([[0.9]], flat, limits=[1, 2])
    with pytest.raises(ConfigError, match="must be between 0 and 1"):
        plan([[1.5]], flat)
    assert threshold_prefix([0.9, 0.4, 0.8], 0.5) == 1


@pytest.mark.parametrize("threshold", [-0.1, 1.1, float("nan")])
def test_a_threshold_is_a_probability(threshold: float) -> None:
    with pytest.raises(ConfigError, match="between 0 and 1"):
        threshold_prefix([0.5], threshold)


def test_appendix_a() -> None:
    """The paper's counterexample: foresight admits a token for what it leads to, and the law moves."""
    table = CostTable([(1, 1 / 1.0), (2, 1 / 0.5), (3, 1 / 0.45)])
    followed_by = {"A": [0.8, 0.9], "B": [0.8, 0.0]}
    p, q = {"A": 0.7, "B": 0.3}, {"A": 0.5, "B": 0.5}

    def law(**options: Any) -> float:
        first = 0.0
        residual = {t: max(p[t] - q[t], 0.0) for t in p}
        for token, confidences in followed_by.items():
            [length] = plan([confidences], table, **options)
            if length == 0:
                first += q[token] * p["A"]
                continue
            kept = min(1.0, p[token] / q[token])
            first += q[token] * (kept * (token == "A") + (1 - kept) * residual["A"] / sum(residual.values()))
        return first

    assert law() == pytest.approx(0.70)
    assert law(foresight=True, rule="coupled") == pytest.approx(0.85), "what the search itself would do"
    for rule in ("rejection", "block"):
        with pytest.raises(ConfigError, match="not lossless"):
            plan([[0.8, 0.9]], table, foresight=True, rule=rule)
    assert plan([[0.8, 0.9]], table, foresight=True, greedy=True) == [2]


def test_cost_tables() -> None:
    with pytest.raises(ConfigError):
        CostTable([])
    for bad in (float("nan"), 0.0, -1.0):
        with pytest.raises(ConfigError):
            CostTable([(1, bad)])
    with pytest.raises(ConfigError, match="twice"):
        CostTable([(1, 1.0), (1, 2.0)])
    noisy = CostTable([(1, 2.0), (2, 1.0), (4, 4.0)])
    seconds = [noisy.seconds(n) for n in range(1, 9)]
    assert seconds == sorted(seconds) and noisy.steps_per_second(1) == pytest.approx(1 / noisy.seconds(1))
    assert CostTable([(3, 0.5)]).seconds(100) == 0.5


def test_calibration() -> None:
    table = Calibration([2.0, 1.0], 2)
    assert table.apply([0.9, 0.9]) == pytest.approx([0.75, 0.9])
    for length in (1, 3):
        with pytest.raises(ConfigError, match="positions"):
            Calibration([1.0] * length, 2)
    with pytest.raises(ConfigError):
        Calibration([0.0, 1.0], 2)
