"""The reference implementation's traces: text, and what each round verified and committed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from dspark import DSparkDecoder, SamplingParams
from golden_traces import DRAFTS, check_trace, rows
from places import DATA


@pytest.mark.parametrize(("name", "row", "run"), rows())
def test_trace(
    decoders: Callable[..., DSparkDecoder], name: str, row: dict[str, Any], run: dict[str, Any]
) -> None:
    check_trace(decoders, name, row, run)


@pytest.mark.parametrize("name", DRAFTS)
def test_plain_text_is_the_targets_own(decoders: Callable[..., DSparkDecoder], name: str) -> None:
    for row in json.loads((DATA / "qwen3" / name / "golden" / "trace.json").read_text()):
        result = decoders(None).generate(row["prompt_ids"], SamplingParams(max_tokens=96, temperature=0.0))
        assert list(result.token_ids) == row["ar_output_ids"]
        assert result.acceptance_length is None and result.speculation == "off: no draft"
