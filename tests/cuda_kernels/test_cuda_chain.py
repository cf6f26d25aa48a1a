"""The Markov chain, emulated, draws what the core draws, and leaves the laws that acceptance needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from cuda_host import Launcher, Library, library, needs_compiler
from cuda_sampling import PARAMS, neutral, planted, run, under, with_faults
from dspark import SamplingParams, _core
from dspark.errors import RequestError

GAMMA, HIDDEN, RANK = 4, 40, 24
KINDS = ("none", "vanilla", "gated", "rnn", "rnn through the anchor")


@pytest.fixture(scope="module", autouse=True)
def emulation() -> Library:
    needs_compiler()
    return library()


@dataclass
class Pass:
    """A draft pass over some requests, and the heads, as the core and as the kernels read them."""

    base: Tensor
    hidden: Tensor
    heads: dict[str, Any]
    device_heads: dict[str, Any]
    anchors: list[int]
    params: list[SamplingParams]
    noise: list[_core.Noise]
    history: list[tuple[list[int], list[int]]]
    lead: int
    """Rows of hidden states before those of the slots."""
    tokens: list[int]
    """The vocabulary of the draft."""

    def by_core(self, rule: str, **settings: Any) -> list[tuple[list[int], list[float]]]:
        """What the core draws."""
        states = GAMMA + self.lead
        return [
            _core.draft_chain(
                anchor,
                self.base[i * GAMMA : (i + 1) * GAMMA],
                self.hidden[i * states : (i + 1) * states],
                self.heads,
                rule,
                self.params[i],
                self.noise[i],
                prompt_ids=self.history[i][0],
                output_ids=self.history[i][1],
                **settings,
            )
            for i, anchor in enumerate(self.anchors)
        ]

    def by_kernel(
        self, rule: str, launcher: Launcher, threads: int | None = 64, **settings: Any
    ) -> tuple[list[tuple[list[int], list[float]]], tuple[_core.ChainPlan, Tensor, Tensor]]:
        """What the kernels draw; the plan and its memory."""
        plan = _core.ChainPlan(
            self.anchors,
            self.base,
            self.hidden,
            self.device_heads,
            rule,
            self.params,
            self.noise,
            self.history,
            gamma=GAMMA,
            **settings,
        )
        outcome, table, scratch = run(plan, launcher, self.memory(), threads)
        return plan.read(outcome), (plan, table, scratch)

    def memory(self) -> list[Tensor]:
        """Every tensor that the kernels read."""
        found = [self.base, self.hidden]
        for part in self.device_heads.values():
            found += [tensor for tensor in part.values() if isinstance(tensor, Tensor)]
        return found


def draft_pass(
    kind: str,
    vocabulary: int = 60,
    *,
    reduced: bool = False,
    dtype: torch.dtype = torch.float32,
    params: tuple[dict[str, Any], ...] = PARAMS,
    seed: int = 0,
) -> Pass:
    """One request for each of `params`, with random tensors."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    tokens = list(range(0, vocabulary, 3)) if reduced else list(range(vocabulary))
    count, lead = len(params), int(kind == "rnn through the anchor")
    heads: dict[str, Any] = {}
    if kind != "none":
        heads["markov"] = {
            "kind": kind.split()[0],
            "w1": random(vocabulary, RANK),
            "w2": random(len(tokens), RANK, scale=0.4),
            "through_anchor": bool(lead),
        }
        if kind == "gated":
            heads["markov"] |= {"weight": random(RANK, HIDDEN + RANK, scale=0.1), "bias": random(RANK)}
        elif kind != "vanilla":
            heads["markov"] |= {
                "weight": random(3 * RANK, 2 * RANK + HIDDEN, scale=0.1),
                "bias": random(3 * RANK),
            }
    width = HIDDEN + (0 if kind == "none" else RANK)
    heads["confidence"] = {
        "weight": random(1, width, scale=0.2),
        "bias": random(1),
        "with_markov": kind != "none",
    }
    device_heads = dict(heads)
    if reduced:
        heads["vocabulary"] = tokens
        column = torch.full((vocabulary,), -1, dtype=torch.int32)
        column[tokens] = torch.arange(len(tokens), dtype=torch.int32)
        device_heads["vocabulary"] = {"tokens": torch.tensor(tokens, dtype=torch.int32), "column": column}
    ids = torch.randint(0, vocabulary, (count, 4), generator=generator).tolist()
    return Pass(
        base=random(count * GAMMA, len(tokens), scale=2.0),
        hidden=random(count * (GAMMA + lead), HIDDEN),
        heads=heads,
        device_heads=device_heads,
        anchors=[row[0] for row in ids],
        params=[neutral(**given) for given in params],
        noise=[_core.Noise(77 * seed + i, 20 + i, i % 2) for i in range(count)],
        history=[(row[4 - i % 4 :], row[1 : 1 + i % 4]) for i, row in enumerate(ids)],
        lead=lead,
        tokens=tokens,
    )


@pytest.mark.parametrize("reduced", [False, True], ids=["whole", "reduced"])
@pytest.mark.parametrize("kind", KINDS)
def test_chains_are_the_cores(emulation: Library, kind: str, reduced: bool) -> None:
    for rule in ("rejection", "coupled"):
        made = draft_pass(kind, reduced=reduced, seed=KINDS.index(kind))
        assert made.by_kernel(rule, emulation)[0] == made.by_core(rule)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["vanilla", "rnn"])
def test_stored_in_sixteen_bits(emulation: Library, kind: str, dtype: torch.dtype) -> None:
    made = draft_pass(kind, 1500, dtype=dtype, params=PARAMS[::3], seed=3)
    assert made.by_kernel("rejection", emulation)[0] == made.by_core("rejection")


def test_a_chain_ends_where_it_should(emulation: Library) -> None:
    """At its limit, before a low confidence, before a row from which nothing can be drawn."""
    made = draft_pass("vanilla", seed=5)
    cut = 0
    for threshold in (0.2, 0.5, 0.8):
        found, _ = made.by_kernel("rejection", emulation, threshold=threshold)
        assert found == made.by_core("rejection", threshold=threshold)
        cut += sum(0 < len(ids) < GAMMA for ids, _ in found)
    assert cut > 5
    for limit in (0, 1, 3):
        found, _ = made.by_kernel("coupled", emulation, limit=limit)
        assert found == made.by_core("coupled", limit=limit)
        assert all(len(ids) == limit for ids, _ in found)
    made.base[GAMMA + 2, 7] = torch.nan
    made.base[2 * GAMMA] = -torch.inf
    found, _ = made.by_kernel("rejection", emulation)
    assert found == made.by_core("rejection")
    assert [len(ids) for ids, _ in found[:4]] == [GAMMA, 2, 0, GAMMA]


@pytest.mark.parametrize("reduced", [False, True], ids=["whole", "reduced"])
def test_the_laws_it_leaves_are_those_of_acceptance(emulation: Library, reduced: bool) -> None:
    made = draft_pass("vanilla", 1100, reduced=reduced, params=PARAMS * 2, seed=9)
    chains, (plan, table, scratch) = made.by_kernel("rejection", emulation)
    generator = torch.Generator().manual_seed(2)
    ids = [tokens[: i % (GAMMA + 1)] for i, (tokens, _) in enumerate(chains)]
    steps = [
        torch.tensor(
            _core.step_logits(
                [made.anchors[i], *tokens[:-1]],
                made.base[i * GAMMA : (i + 1) * GAMMA],
                made.hidden[i * GAMMA : (i + 1) * GAMMA],
                made.heads,
            ),
            dtype=torch.float32,
        )
        for i, tokens in enumerate(ids)
        if tokens
    ]
    draft = torch.full((sum(map(len, ids)), 1100), -torch.inf)
    draft[:, made.tokens] = torch.cat(steps)
    target = torch.randn(sum(len(tokens) + 1 for tokens in ids), 1100, generator=generator) * 2
    start = row = 0
    for tokens in ids:  # targets that often agree
        target[row : row + len(tokens)] += 0.9 * draft[start : start + len(tokens)].clamp(min=-9)
        start, row = start + len(tokens), row + len(tokens) + 1
    firsts = [GAMMA * i for i in range(len(ids))]
    judged = _core.VerifyPlan(
        target,
        ids,
        (plan, table.data_ptr(), scratch.data_ptr(), firsts),
        "rejection",
        made.params,
        made.noise,
        made.history,
    )
    outcome, _, _ = run(judged, emulation, [target, table, scratch, *made.memory()])
    expected = _core.accept_batch(target, ids, draft, "rejection", made.params, made.noise, made.history)
    found = judged.read(outcome)
    assert [verdict[:2] for verdict in found] == expected
    kept = [accepted for accepted, _ in expected]
    assert any(0 < n < len(tokens) for n, tokens in zip(kept, ids, strict=True)) and 0 in kept


def test_a_stale_token_is_caught() -> None:
    """Step k + 1 reads the token that step k drew."""
    made = draft_pass("vanilla", params=({},) * 20)
    assert made.by_kernel("rejection", with_faults())[0] == made.by_core("rejection")
    with planted("STALE_TOKEN") as faulty:
        assert made.by_kernel("rejection", faulty)[0] != made.by_core("rejection")


@pytest.mark.parametrize("kind", ["address", "thread"])
def test_under_sanitizers(kind: str) -> None:
    made = draft_pass("rnn through the anchor", 1030, params=PARAMS[12:14], dtype=torch.bfloat16)
    assert made.by_kernel("rejection", under(kind), limit=1)[0] == made.by_core("rejection", limit=1)


def test_what_the_kernels_do_not_serve_is_refused() -> None:
    made = draft_pass("vanilla", params=({},))
    wide = {"w1": torch.zeros(60, 2000), "w2": torch.zeros(60, 2000)}
    made.device_heads = {"markov": made.device_heads["markov"] | wide}
    with pytest.raises(RequestError, match="rank 2000"):
        made.by_kernel("rejection", library())
    made.base = made.base.double()
    with pytest.raises(RequestError, match="float64"):
        made.by_kernel("rejection", library())


def test_heads_that_do_not_fit_the_pass_are_refused() -> None:
    """The kernels would read beyond the ends of tensors."""

    def refused(kind: str, **changed: Any) -> str:
        made = draft_pass(kind, params=({},) * 2)
        for name, tensor in changed.items():
            if name in ("base", "hidden"):
                setattr(made, name, tensor)
            elif name == "confidence":
                made.device_heads["confidence"] = {**made.device_heads["confidence"], "weight": tensor}
            else:
                made.device_heads["markov"] = {**made.device_heads["markov"], name: tensor}
        with pytest.raises(RequestError) as error:
            made.by_kernel("rejection", library())
        return str(error.value)

    columns = draft_pass("vanilla", params=({},)).base.shape[1]
    narrow = torch.zeros(columns, RANK - 1)
    assert refused("vanilla", w2=narrow) == f"markov_w2 must be [{columns}, 24], found [{columns}, 23]"
    assert "markov_w2 must be" in refused("vanilla", w2=torch.zeros(columns - 1, RANK))
    assert "gate_proj.weight must be [24, 64]" in refused("gated", weight=torch.zeros(RANK, HIDDEN))
    assert "gate_proj.bias must be [1, 24]" in refused("gated", bias=torch.zeros(RANK - 1))
    assert "joint_proj.weight must be [72, 88]" in refused("rnn", weight=torch.zeros(3 * RANK, HIDDEN))
    assert "confidence_head.proj.weight must be" in refused("vanilla", confidence=torch.zeros(1, HIDDEN - 1))
    assert "draft states must be [8, 40]" in refused("vanilla", hidden=torch.zeros(7, HIDDEN))
    assert "not whole blocks of 4" in refused("vanilla", base=torch.zeros(7, columns))
    assert "no block 1 of 4" in refused("none", base=torch.zeros(4, columns), hidden=torch.zeros(4, HIDDEN))
