"""A small run on the embedded target, for the tests of training."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from dspark import DSparkDecoder, SamplingParams
from dspark.train.loop import Pace
from dspark.train.settings import DataSettings, Settings
from dspark.train.shape import Shape
from dspark.train.world import World

STARTS = ("def ", "import os\n", "class A:\n", "for i in range(", "return self.", "try:\n", "# This ", "if x")
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
CLOSES_QUESTIONS = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}<|endoftext|>{% endif %}{% endfor %}"
)
SMALL = Shape(layers=1, markov_rank=8, block_size=4, taps=(0, 2, 4))


def write_chats(file: Path, decoder: DSparkDecoder, count: int = 24, tokens: int = 40) -> Path:
    """Answers of the embedded target as token ids."""
    prompts = [STARTS[i % len(STARTS)] + "x" * (i // len(STARTS)) for i in range(count)]
    params = [SamplingParams(max_tokens=tokens, temperature=0.8, seed=i) for i in range(count)]
    lines = []
    for result in decoder.generate(prompts, params):
        start = len(result.prompt_token_ids)
        ids = [*result.prompt_token_ids, *result.token_ids]
        lines.append(json.dumps({"token_ids": ids, "answer_start": start}))
    file.write_text("\n".join(lines))
    return file


ALONE = World(0, 1, torch.device("cpu"))


def small_run(output: Path, chats: Path, *, shape: dict[str, Any] | None = None, **changes: Any) -> Settings:
    """Settings of a run of 8 steps that writes its state after each."""
    pace = {"steps": 8, "sequences": 4, "report_every": 1, "evaluate_every": 8, "checkpoint_seconds": 0.0}
    pace |= changes.pop("pace", {})
    data = {"files": (chats,), "held_out": 0.2} | changes.pop("data", {})
    settings = Settings(
        target="tiny",
        output=output,
        data=DataSettings(**data),
        shape=dataclasses.replace(SMALL, **(shape or {})),
        pace=Pace(**pace),
        anchors=8,
        learning_rate=3e-3,
        device="cpu",
        held_out_sequences=2,
        held_out_anchors=4,
    )
    return dataclasses.replace(settings, **changes)
