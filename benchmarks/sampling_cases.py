"""Verify sampling and Markov chains by kernels, against the core's decisions on the same numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dspark import SamplingParams, _core
from dspark.kernels import Choice
from dspark.kernels.sampler import Sampler

TIMED: tuple[dict[str, Any], ...] = ({"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.9})
"""Parameters to time: without and with a cut of each row, which costs several passes over it."""


class SamplingCase:
    """Requests with a chain of drafted tokens each: the chain, then the verdict over it."""

    def __init__(
        self,
        choice: Choice,
        device: torch.device,
        dtype: torch.dtype,
        requests: int,
        block: int,
        vocabulary: int,
        rank: int,
        rule: str = "rejection",
        **given: Any,
    ) -> None:
        if choice.kernels is None:
            raise RuntimeError(f"sampling: {choice.reason}")
        generator = torch.Generator().manual_seed(0)

        def draw(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=generator).to(dtype)

        self.rule = rule
        self.requests, self.block, self.vocabulary = requests, block, vocabulary
        self.base = draw(requests * block, vocabulary) * 2
        near = self.base.view(requests, block, vocabulary)
        last = draw(requests, vocabulary).view(requests, 1, vocabulary)
        self.target = torch.cat((near + 0.5 * draw(requests * block, vocabulary).view_as(near), last), 1)
        self.target = self.target.view(-1, vocabulary)
        self.heads = {
            "markov": {"kind": "vanilla", "w1": draw(vocabulary, rank), "w2": draw(vocabulary, rank)}
        }
        self.heads["markov"]["w2"] = self.heads["markov"]["w2"] / rank**0.5
        params = SamplingParams(**given).with_defaults({})
        self.params, self.history = [params] * requests, [([1, 2, 3], [4])] * requests
        self.noise = [_core.Noise(1000 + request, 4) for request in range(requests)]
        self.anchors = [request % vocabulary for request in range(requests)]
        self._there = {
            name: tensor.to(device) for name, tensor in (("base", self.base), ("target", self.target))
        }
        moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in self.heads["markov"].items()}
        self._sampler = Sampler(choice.kernels, device, {"markov": moved})

    def run(self, plan: _core.ChainPlan | _core.VerifyPlan) -> bytes:
        """Copies a plan to the device, runs its kernels, and copies the outcome back."""
        return self._sampler.run(plan)[0]

    def chain_plan(self) -> _core.ChainPlan:
        """The plan of all requests' chains."""
        return _core.ChainPlan(
            self.anchors,
            self._there["base"],
            None,
            self._sampler.heads,
            self.rule,
            self.params,
            self.noise,
            self.history,
            gamma=self.block,
        )

    def chain(self) -> list[tuple[list[int], list[float]]]:
        """Tokens drafted by kernel, and their confidences, of which there are none."""
        plan = self.chain_plan()
        return plan.read(self.run(plan))

    def verify_plan(self, ids: list[list[int]]) -> _core.VerifyPlan:
        """The plan of the verdicts. The draft's distribution is the one without the Markov bias: not the
        chain's, but just as valid."""
        return _core.VerifyPlan(
            self._there["target"], ids, self._there["base"], self.rule, self.params, self.noise, self.history
        )

    def verdict(self, ids: list[list[int]]) -> list[tuple[int, int, bool]]:
        """The number of kept tokens and the token after them, by kernel; and whether a margin was within
        rounding."""
        plan = self.verify_plan(ids)
        return plan.read(self.run(plan))

    def core_chain(self) -> list[list[int]]:
        """The core's chains, request by request."""
        rows = self.base.split(self.block)
        given = zip(self.anchors, rows, self.params, self.noise, self.history, strict=True)
        return [
            _core.draft_chain(
                anchor, base, None, self.heads, self.rule, params, noise, prompt_ids=prompt, output_ids=output
            )[0]
            for anchor, base, params, noise, (prompt, output) in given
        ]

    def core_verdict(self, ids: list[list[int]]) -> list[Any]:
        """The core's verdicts."""
        return _core.accept_batch(
            self.target, ids, self.base, self.rule, self.params, self.noise, self.history
        )

    def differences(self) -> tuple[int, int]:
        """How many chains and verdicts differ from the core's, not counting verdicts with close margins, and
        how many of these there are."""
        ids = self.core_chain()
        chains = sum(ours != core for (ours, _), core in zip(self.chain(), ids, strict=True))
        ids = [tokens + [0] * (self.block - len(tokens)) for tokens in ids]
        found, right = self.verdict(ids), self.core_verdict(ids)
        wrong = sum(ours[:2] != core for ours, core in zip(found, right, strict=True) if not ours[2])
        return chains + wrong, sum(close for _, _, close in found)
