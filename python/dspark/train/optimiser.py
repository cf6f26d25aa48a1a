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
"""Never trained by Muon: W1 and W2 are tables over the vocabulary, and a step touches few of their rows (the
public recipes keep them at Adam's high rate: with a lower one, the bias that they learn stays small)."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Warm-up over `warmup` of all steps, then a cosine to 0 (as in DeepSpec).

    With `cooldown`, a share of all steps, the rate stays at the peak until this last share, and then falls as
    1 - sqrt (arXiv 2405.18392): such a run can be made longer before it cools down.
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
        """`muon`: Muon trains the matrices of the backbone, at `muon_factor` times the rate and scaled so
        that its updates are as large as Adam's (arXiv 2502.16982); AdamW trains everything else."""
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
        """Takes one step at this rate with gradients clipped to a norm of `clip` (0: not clipped), returns
        their norm before clipping, and drops them. Gradients that are not finite are not applied."""
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
        """Restores the `state_dict` of as many optimisers; this run's own settings (`OWN`) stay in force."""
        for optimiser, state in zip(self.parts, states, strict=True):
            # The groups that torch reads say where it puts a state: without fused, steps go to the CPU.
            groups = [
                saved | {key: group[key] for key in OWN if key in group}
                for saved, group in zip(state["param_groups"], optimiser.param_groups, strict=True)
            ]
            optimiser.load_state_dict({**state, "param_groups": groups})


OWN = ("weight_decay", "fused")
"""What a group takes from this run's settings, not from the saved group; the rate is set in each step."""
