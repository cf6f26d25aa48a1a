"""Batches for the sampling kernels, run by an emulation, beside the core's decisions on the same numbers."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cuda_host import EMULATE, KERNELS, Launcher, Library, Replay, build, library, sanitized
from dspark import SamplingParams, _core

Outcome = tuple[int, int]


UNITS = (KERNELS / "sampling.cu", KERNELS / "chain.cu")


def under(sanitizer: str) -> Replay:
    """The kernels of sampling and chains, built with a sanitizer."""
    return sanitized(sanitizer, sources=UNITS)


@cache
def with_faults() -> Library:
    """These kernels with the faults of planted.cuh to be planted."""
    parts = (*UNITS, EMULATE / "run.cpp", EMULATE / "fibers.cpp", EMULATE / "driver.cpp")
    return Library(build(parts, shared=True, flags=("-O1", "-DPLANTED_FAULTS"), name="faulty"))


@contextmanager
def planted(fault: str) -> Iterator[Library]:
    """The kernels with one of the faults."""
    faulty = with_faults()
    faulty._library.plant(FAULTS[fault])
    try:
        yield faulty
    finally:
        faulty._library.plant(0)


FAULTS = {
    "SHARED_STREAM": 1,
    "REUSED_UNIFORM": 2,
    "ROUNDED_DRAFT_LAW": 3,
    "POSITION_KEYS": 4,
    "TARGET_ARGMAX": 5,
    "EMPTY_CUT_REJECTS": 6,
    "STALE_TOKEN": 7,
    "TIES_BY_RANK_ONLY": 8,
}


def run(
    plan: _core.VerifyPlan | _core.ChainPlan,
    launcher: Launcher,
    also: Sequence[Tensor],
    threads: int | None = 64,
) -> tuple[bytes, Tensor, Tensor]:
    """Launches a plan; `also` are the tensors that it reads. Gives the outcome, the table and the scratch."""
    table = torch.frombuffer(bytearray(plan.table), dtype=torch.uint8)
    scratch = torch.full((plan.scratch,), 0xFF, dtype=torch.uint8)
    for entry, grid, block, raw in plan.launches(table.data_ptr(), scratch.data_ptr(), threads):
        args: Any = (ctypes.c_char * len(raw)).from_buffer_copy(raw)
        launcher.launch(entry, grid, block, args, [table, scratch, *also])
    start, size = plan.result
    return scratch[start : start + size].numpy().tobytes(), table, scratch


@dataclass
class Batch:
    """Requests: the i-th owns `len(ids[i]) + 1` rows of `target` and `len(ids[i])` of `draft`."""

    target: Tensor
    draft: Tensor
    ids: list[list[int]] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    noise: list[_core.Noise] = field(default_factory=list)
    history: list[tuple[list[int], list[int]]] = field(default_factory=list)

    def by_core(self, rule: str) -> list[Any]:
        """What the core decides."""
        return _core.accept_batch(
            self.target, self.ids, self.draft, rule, self.params, self.noise, self.history
        )

    def by_kernel(
        self, rule: str, launcher: Launcher, threads: int | None = 64
    ) -> list[tuple[int, int, bool]]:
        """What the kernels decide, and which decisions were within rounding."""
        plan = _core.VerifyPlan(
            self.target, self.ids, self.draft, rule, self.params, self.noise, self.history
        )
        outcome, _, _ = run(plan, launcher, [self.target, self.draft], threads)
        return plan.read(outcome)

    def differences(self, rule: str, launcher: Launcher, threads: int | None = 64) -> tuple[int, int]:
        """How many verdicts differ although no margin was within rounding, and how many margins were."""
        found, expected = self.by_kernel(rule, launcher, threads), self.by_core(rule)
        wrong = sum(kernel[:2] != core for kernel, core in zip(found, expected, strict=True) if not kernel[2])
        return wrong, sum(close for _, _, close in found)


def neutral(**given: Any) -> SamplingParams:
    """Parameters with nothing left open."""
    return SamplingParams(**given).with_defaults({})


PARAMS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.0},
    {"temperature": 0.6},
    {"temperature": 1e-6},
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": 40, "temperature": 1.7},
    {"top_p": 0.7},
    {"top_p": 1e-4},
    {"top_p": 0.999, "temperature": 2.5},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.02, "temperature": 0.9},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.7, "presence_penalty": 0.6, "frequency_penalty": 0.5, "top_p": 0.9},
    {"presence_penalty": -0.4, "frequency_penalty": 1.1, "temperature": 0.0},
    {"logit_bias": {0: 1.5, 3: -2.0}, "top_k": 5},
    {"logit_bias": {1: -1e6}, "temperature": 0.8},
    {"min_tokens": 6, "stop_token_ids": [0, 2], "repetition_penalty": 1.2},
)


def rows(generator: torch.Generator, count: int, vocabulary: int, style: str, dtype: torch.dtype) -> Tensor:
    """Logits of one kind."""
    wild = torch.randn(count, vocabulary, generator=generator) * 3
    if style == "ties":
        wild = wild.round()
    elif style == "equal":
        wild = torch.full_like(wild, -1.25)
    elif style == "holes":
        wild = wild.masked_fill(torch.rand(wild.shape, generator=generator) < 0.4, float("-inf"))
        wild[:, vocabulary // 2] = 0.5
    elif style == "lone":
        wild = torch.full_like(wild, float("-inf"))
        wild[:, vocabulary - 1] = -3.0
    elif style == "zeros":
        wild = torch.where(torch.rand(wild.shape, generator=generator) < 0.5, -0.0, 0.0)
    elif style == "wide":
        wild = wild * 30
    return wild.to(dtype)


STYLES = ("wild", "ties", "equal", "holes", "lone", "zeros", "wide")


def batch(
    seed: int,
    vocabulary: int,
    dtype: torch.dtype,
    *,
    style: str = "wild",
    rule: str = "rejection",
    params: Sequence[dict[str, Any]] = PARAMS,
    most: int = 4,
    near: float = 0.5,
) -> Batch:
    """One request for each of `params`, with up to `most` drafted tokens. Drafts resemble the target by
    `near`, and tokens are drawn from them as the rule does."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [int(n) for n in torch.randint(0, most + 1, (len(params),), generator=generator)]
    total = sum(lengths)
    target = rows(generator, total + len(lengths), vocabulary, style, dtype)
    draft = rows(generator, total, vocabulary, style, dtype)
    made = Batch(target, draft)
    row = start = 0
    for i, (given, length) in enumerate(zip(params, lengths, strict=True)):
        if style in ("wild", "ties", "wide"):
            part = draft[start : start + length].float()
            mixed = target[row : row + length].float() * near + part * (1 - near)
            draft[start : start + length] = (mixed.round() if style == "ties" else mixed).to(dtype)
        prompt = torch.randint(0, vocabulary, (5,), generator=generator).tolist()
        output = torch.randint(0, vocabulary, (i % 4,), generator=generator).tolist()
        sampling, noise = neutral(**given), _core.Noise(1000 * seed + i, 50 + i, i % 3)
        ids = drafted(draft[start : start + length], rule, sampling, noise, prompt, output)
        made.ids.append(ids)
        made.params.append(sampling)
        made.noise.append(noise)
        made.history.append((prompt, output))
        row, start = row + length + 1, start + length
    return made


def drafted(
    rows: Tensor,
    rule: str,
    sampling: SamplingParams,
    noise: _core.Noise,
    prompt: list[int],
    output: list[int],
) -> list[int]:
    """A token for each row, drawn by a chain without heads: from the law that acceptance will see."""
    if len(rows) == 0:
        return []
    plan = _core.ChainPlan(
        [0], rows, None, {}, rule, [sampling], [noise], [(prompt, output)], gamma=len(rows)
    )
    outcome, _, _ = run(plan, library(), [rows])
    [(ids, _)] = plan.read(outcome)
    return ids + [0] * (len(rows) - len(ids))
