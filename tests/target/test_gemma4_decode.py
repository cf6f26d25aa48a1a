"""A Gemma 4 pair end to end: the same text with the draft as without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dspark import DSparkDecoder, SamplingParams
from dspark.draft import load_draft
from dspark.errors import ConfigError
from dspark.target import load_target
from gemma4_zoo import write_draft, write_target
from random_pair import write_target as write_qwen3

VOCAB = 7
PROMPTS = [[seed % VOCAB, 3, 5, 1][: 1 + seed % 4] for seed in range(6)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    path = tmp_path_factory.mktemp("gemma4")
    return (
        write_target(path / "target", vocab_size=VOCAB),
        write_draft(path / "draft", vocab_size=VOCAB, mask_token_id=0),
        write_draft(path / "other", seed=5, vocab_size=VOCAB, mask_token_id=0, markov_head_type="rnn"),
    )


def run(
    target: Path, draft: Path | None, params: list[SamplingParams], **options: Any
) -> tuple[list[Any], int]:
    options = {"policy": "fixed", **options}
    with DSparkDecoder.from_pretrained(target, draft, device="cpu", dtype="float64", **options) as decoder:
        results = decoder.generate(PROMPTS, params)
        assert all(result.error is None for result in results)
        return [result.token_ids for result in results], decoder.stats()["accepted"]


@pytest.mark.parametrize("acceptance", ["rejection", "block", "coupled"])
def test_greedy_text_needs_no_draft(pair: tuple[Path, Path, Path], acceptance: str) -> None:
    """Longer than what sliding layers hold at first; both drafts, whole blocks and cut ones."""
    target, *drafts = pair
    params = [SamplingParams(max_tokens=200, temperature=0.0)] * len(PROMPTS)
    expected, _ = run(target, None, params, acceptance=acceptance)
    for draft in drafts:
        for options in ({}, {"policy": "threshold", "confidence_threshold": 0.4}):
            texts, accepted = run(target, draft, params, acceptance=acceptance, **options)
            assert texts == expected
            assert accepted > 0


def test_coupled_text_needs_no_draft(pair: tuple[Path, Path, Path]) -> None:
    target, *drafts = pair
    for sampling in ({"temperature": 1.0}, {"temperature": 0.7, "top_k": 4}):
        params = [SamplingParams(max_tokens=150, seed=seed, **sampling) for seed in range(len(PROMPTS))]
        expected, _ = run(target, None, params, acceptance="coupled")
        for draft in drafts:
            texts, accepted = run(target, draft, params, acceptance="coupled")
            assert texts == expected
            assert accepted > 0


def test_a_draft_of_another_target_is_refused(pair: tuple[Path, Path, Path], tmp_path: Path) -> None:
    other = load_target(write_qwen3(tmp_path / "qwen3", VOCAB))
    with pytest.raises(ConfigError, match="not fit the target: width of a tap is 32 in the draft, 16 in the"):
        load_draft(pair[1], target=other)
