"""All settings of a run, checked before anything is loaded."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dspark.errors import ConfigError
from dspark.train.attention import KINDS
from dspark.train.data.generate import Sampling
from dspark.train.loop import Pace
from dspark.train.losses import Objective
from dspark.train.shape import Shape

SAVE_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


Range = tuple[Callable[[Any], bool], str]
_COUNT: Range = lambda v: v >= 1, "at least 1"
_NATURAL: Range = lambda v: v >= 0, "at least 0"
_SIZE: Range = lambda v: 0.0 <= v < math.inf, "a number of at least 0"
_ABOVE: Range = lambda v: 0.0 < v < math.inf, "a number above 0"
_PART: Range = lambda v: 0.0 <= v < 1.0, "a share of at least 0 and below 1"
_SHARE: Range = lambda v: 0.0 <= v <= 1.0, "a share from 0 to 1"

RANGES: dict[str, Range] = {
    **dict.fromkeys(
        ("steps", "sequences", "report_every", "evaluate_every", "anchors", "micro_batch"), _COUNT
    ),
    **dict.fromkeys(("samples", "batch_size", "held_out_anchors"), _COUNT),
    **dict.fromkeys(("self_prompts", "cache_limit", "held_out_sequences", "seed"), _NATURAL),
    **dict.fromkeys(("cross_entropy", "distance", "confidence", "decay", "clip", "weight_decay"), _SIZE),
    **dict.fromkeys(("context_noise", "checkpoint_seconds", "stop_after"), _SIZE),
    **dict.fromkeys(("learning_rate", "muon_factor"), _ABOVE),
    **dict.fromkeys(("held_out", "warmup"), _PART),
    **dict.fromkeys(("failed_anchors", "early_cross_entropy", "early_share"), _SHARE),
    "cooldown": (lambda v: 0.0 < v <= 1.0, "a share above 0 and at most 1"),
    "max_length": (lambda v: v >= 2, "at least 2"),
}
"""The range of each number, wherever in the settings it is; None stands for a number that was not given."""


@dataclass(frozen=True, slots=True)
class DataSettings:
    """Where conversations come from; several sources add up.

    Attributes:
        files: conversations as they are. prompts: users' turns to answer, `samples` times each.
        self_prompts: how many prompts the target makes up; openers: a file with one per line.
        draft: to generate with; the positions where verify passes failed are kept.
        sampling: of answers. template_options: keywords of the target's chat template.
        max_length: most tokens of a conversation. held_out: share of the prompts.
        cache: a directory for hidden states, None: computed on the fly; cache_limit: bytes.
    """

    files: tuple[Path, ...] = ()
    prompts: Path | None = None
    samples: int = 1
    self_prompts: int = 0
    openers: Path | None = None
    draft: str | None = None
    sampling: Sampling = field(default_factory=Sampling)
    template_options: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 32
    max_length: int = 1024
    held_out: float = 0.05
    cache: Path | None = None
    cache_limit: int = 4_000_000_000


@dataclass(frozen=True, slots=True)
class Settings:
    """A run.

    Attributes:
        target: a directory or a known name. output: the run's directory; the draft is in its `draft`.
        shape: of a new draft; start: instead, a draft to continue from, which keeps its shape except
            for the training_block_size, if that is given; start_layers: the target's layers from which
            a new draft's layers are copied, and with them the final norm.
        anchors: blocks per sequence. failed_anchors: share of them where verify passes failed.
        context_noise: see `noisy`. learning_rate, warmup, cooldown: see `Rate`. clip (0: off), muon,
            muon_factor, weight_decay: of the optimiser.
        micro_batch: sequences at a time. bf16: autocast. attention: see `dspark.train.attention`.
        parallel: "ddp" or "fsdp". packaging, save_dtype, save_head: see `save_draft`.
        held_out_sequences, held_out_anchors: conversations of an evaluation, and blocks in each.
    """

    target: str
    output: Path
    data: DataSettings
    shape: Shape
    pace: Pace
    goal: Objective = field(default_factory=Objective)
    start: str | None = None
    start_layers: tuple[int, ...] = ()
    anchors: int = 512
    failed_anchors: float = 0.0
    context_noise: float = 0.0
    detach_confidence: bool = False
    learning_rate: float = 6e-4
    warmup: float = 0.04
    cooldown: float | None = None
    clip: float = 1.0
    muon: bool = False
    muon_factor: float = 1.0
    weight_decay: float = 0.0
    micro_batch: int = 4
    bf16: bool = False
    device: str = "auto"
    dtype: str = "auto"
    attention: str | None = None
    parallel: str = "ddp"
    seed: int = 0
    packaging: str | None = None
    save_dtype: str = "bfloat16"
    save_head: bool = True
    tensorboard: bool = False
    held_out_sequences: int = 32
    held_out_anchors: int = 32
    accept_changes: bool = False

    def __post_init__(self) -> None:
        """
        Raises:
            ConfigError: names the value, what was expected and what was found.
        """
        for owner in (self, self.data, self.pace, self.goal):
            for name, (whether, expected) in RANGES.items():
                found = getattr(owner, name, None)
                if found is not None and not whether(found):
                    raise ConfigError(f"{name} is {found}; expected {expected}")
        low, high = self.data.sampling.temperatures
        if low > high:
            raise ConfigError(f"temperatures are {low} to {high}; expected the lower one first")
        self.data.sampling.params(0)  # refuses what no answer could be drawn with
        if "add_generation_prompt" in self.data.template_options:
            raise ConfigError("template_options has add_generation_prompt, which training sets itself")
        for name, chosen, known in (
            ("position_weights", self.goal.position_weights, ("decay", "dpace")),
            ("attention", KINDS[0] if self.attention is None else self.attention, KINDS),
            ("parallel", self.parallel, ("ddp", "fsdp")),
            ("save_dtype", self.save_dtype, tuple(SAVE_DTYPES)),
        ):
            if chosen not in known:
                raise ConfigError(f"{name} must be one of {', '.join(known)}, not {chosen!r}")
        for name, file in (("prompts", self.data.prompts), ("openers", self.data.openers)):
            if file is not None and not file.is_file():
                raise ConfigError(f"{name} is {file}; no such file")
        for file in self.data.files:
            if not file.exists():
                raise ConfigError(f"data names {file}; no such file or directory")
        if not (self.data.files or self.data.prompts or self.data.self_prompts):
            raise ConfigError("there is nothing to train on: give data, prompts, or self_prompts")

    def curve(self, target_content: str) -> dict[str, Any]:
        """The settings that determine the learning curve: a resumed run must have the same ones, unless it
        accepts changes. They do not include how often and where things are written, nor the device.
        `target_content`: the target's `identity`."""
        free = ("output", "pace", "data", "device", "attention", "parallel", "micro_batch", "tensorboard",
                "packaging", "save_dtype", "save_head", "held_out_sequences", "held_out_anchors",
                "accept_changes")  # fmt: skip
        values = {k: v for k, v in dataclasses.asdict(self).items() if k not in free}
        values |= {"steps": self.pace.steps, "sequences": self.pace.sequences}
        values["target_content"] = target_content
        plain: dict[str, Any] = json.loads(json.dumps(values, default=str))
        return plain
