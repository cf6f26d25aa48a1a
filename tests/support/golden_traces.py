"""The reference implementation's traces: text, and what each round verified and committed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dspark import DSparkDecoder, SamplingParams
from places import DATA, RNN_DRAFT

DRAFTS: dict[str, str | Path] = {"draft-vanilla": "tiny-draft", "draft-rnn": RNN_DRAFT}
BLOCK = 7


def rows() -> list[Any]:
    return [
        pytest.param(name, row, run, id=f"{name}-{i}-{run['confidence_threshold']}")
        for name in DRAFTS
        for i, row in enumerate(json.loads((DATA / "qwen3" / name / "golden" / "trace.json").read_text()))
        for run in row["runs"]
    ]


def check_trace(
    decoders: Callable[..., DSparkDecoder], name: str, row: dict[str, Any], run: dict[str, Any]
) -> None:
    decoder = decoders(DRAFTS[name], policy="threshold", confidence_threshold=run["confidence_threshold"])
    limit = row["max_new_tokens"]
    result = decoder.generate(row["prompt_ids"], SamplingParams(max_tokens=limit, temperature=0.0))
    assert list(result.token_ids) == run["output_ids"]
    done, compared = 1, 0  # the prefill's own token belongs to no round
    for got, committed, proposed in zip(
        result.rounds, run["acceptance_lengths"], run["proposal_lengths"], strict=False
    ):
        if done + BLOCK + 1 > limit:
            break  # the reference drafts past the limit and cuts afterwards, we verify less
        assert (got.committed, got.verified, got.drafted) == (committed, proposed, proposed)
        assert got.accepted + 1 == committed and len(got.confidence) == got.drafted
        done, compared = done + committed, compared + 1
    assert compared > 10
    if run["confidence_threshold"] <= 0.5:
        assert result.acceptance_length is not None and result.acceptance_length > 1.0
