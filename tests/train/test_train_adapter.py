"""A draft for a target that runs through transformers, and targets that no draft's head can follow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from adapter_zoo import VOCAB, write
from dspark import DSparkDecoder, SamplingParams
from dspark.errors import CheckpointError
from dspark.target import load_target
from dspark.target.load import read_target_config
from dspark.train.run import train
from dspark.train.settings import Settings
from training import small_run

ROWS = torch.randint(0, VOCAB, (6, 24), generator=torch.Generator().manual_seed(3)).tolist()


def settings(path: Path, kind: str) -> Settings:
    chats = path / "chats.jsonl"
    chats.write_text("\n".join(json.dumps({"token_ids": row, "answer_start": 4}) for row in ROWS))
    return small_run(
        path / "run",
        chats,
        target=str(write(path / "target", kind)),
        dtype="float32",
        save_dtype="float32",
        shape={"taps": (0,), "mask_token_id": 1},
        pace={"steps": 2, "sequences": 2},
        data={"held_out": 0.0},
    )


def test_a_draft_can_be_trained_for_it(tmp_path: Path) -> None:
    run = settings(tmp_path, "mistral-window")
    assert read_target_config(Path(run.target)) == load_target(run.target, dtype=torch.float32).config
    train(run, print)
    params = SamplingParams(max_tokens=8, temperature=0.0)
    texts = []
    for draft in (tmp_path / "run" / "draft", None):
        with DSparkDecoder.from_pretrained(run.target, draft, device="cpu", policy="fixed") as decoder:
            texts.append(decoder.generate([2, 3, 4], params))
    assert texts[0].token_ids == texts[1].token_ids
    assert sum(one.drafted for one in texts[0].rounds) > 0


@pytest.mark.parametrize("kind", ["cohere", "granite"])
def test_a_target_that_scales_its_logits_is_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(CheckpointError, match="this target scales its logits"):
        train(settings(tmp_path, kind), print)
