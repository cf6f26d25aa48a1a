"""AdamW, optionally Muon for the matrices, and the schedule of the rate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dspark.errors import ConfigError
from dspark.train.muon import muon_of

HEADS = ("markov_head.markov_w1.", "markov_head.markov_w2.", "confidence_head.")
"""Never under Muon: W1 and W2 are tables over the vocabulary, of which a step touches few rows (the public
recipes keep them at Adam's high rate: with less the bias they learn stays small)."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Warm-up over `warmup` of all steps, then a cosine to 0 (as in DeepSpec).

    With `cooldown`, a share of all steps, the rate stays at the peak until then and falls as 1 - sqrt
    (arXiv 2405.18392): such a run can be made longer before it cools down.
    """

    peak: float
    steps: int
    warmup: float = 0.04
    cooldown: float | None = None

    def at(self, step: int) -> float:
        """The rate of step 0, 1, ..."""
        warm = max(1, round(self.warmup * self.steps))
        if step < warm:
            return self.peak * (step + 1) / warm
        share = 1.0 if self.cooldown is None else self.cooldown
        start = max(warm, self.steps - round(share * self.steps))
        done = min(1.0, max(0, step - start) / max(1, self.steps - start))
        left = 0.5 * (1.0 + math.cos(math.pi * done)) if self.cooldown is None else 1.0 - math.sqrt(done)
        return self.peak * left


class Optimiser:
    """One or two of torch's optimisers, stepped together; their rates are set before each step."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        muon: bool = False,
        muon_factor: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        """`muon`: matrices of the backbone go by Muon at `muon_factor` times the rate, scaled so that its
        updates are as large as Adam's (arXiv 2502.16982); all else by AdamW."""
        matrices = {n: p for n, p in parameters.items() if muon and p.dim() == 2 and not n.startswith(HEADS)}
        others = [p for n, p in parameters.items() if n not in matrices]
        if not parameters:
            raise ConfigError("there is nothing to train")
        fused = all(type(p.data) is torch.Tensor for p in others)  # not for sharded parameters
        adam = torch.optim.AdamW(others, lr=0.0, weight_decay=weight_decay, fused=fused)
        self._all: list[tuple[float, torch.optim.Optimizer]] = [(1.0, adam)]
        if matrices:
            self._all.append((muon_factor, muon_of(list(matrices.values()), weight_decay)))
        self._parameters = list(parameters.values())

    def step(self, rate: float, clip: float) -> float:
        """One step at this rate, gradients clipped to a norm of `clip` (0: as they are); returns their norm
        before, and forgets them. Gradients that are not finite are not applied."""
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, clip or math.inf)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if bool(norm.isfinite()):
            for factor, optimiser in self._all:
                for group in optimiser.param_groups:
                    group["lr"] = rate * factor
                optimiser.step()
        for parameter in self._parameters:
            parameter.grad = None
        return float(norm)

    @property
    def parts(self) -> list[torch.optim.Optimizer]:
        """The optimisers themselves, AdamW first."""
        return [optimiser for _, optimiser in self._all]

    def state_dict(self) -> list[dict[str, Any]]:
        """What a resumed run needs."""
        return [optimiser.state_dict() for optimiser in self.parts]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Takes `state_dict` back, of as many optimisers; what was asked for now stays in force."""
        for optimiser, state in zip(self.parts, states, strict=True):
            # torch puts a state where the groups that it reads say: where nothing is fused, steps on the CPU.
            groups = [
                saved | {key: group[key] for key in OWN if key in group}
                for saved, group in zip(state["param_groups"], optimiser.param_groups, strict=True)
            ]
            optimiser.load_state_dict({**state, "param_groups": groups})


OWN = ("weight_decay", "fused")
"""What a group has from this run's settings, and a saved one from its own; the rate comes with each step."""
