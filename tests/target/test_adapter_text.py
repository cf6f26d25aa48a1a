"""Text of adapted targets: that of transformers' own generate, whatever the draft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from adapter_zoo import DTYPE, KINDS, VOCAB, write
from commandline import run as run_command
from dspark import DSparkDecoder, SamplingParams
from dspark.audit.run import audit_pair
from dspark.calibrate.rollout import Plan
from dspark.serve.models import Models
from dspark.serve.options import Options
from dspark.serve.runner import Runner
from random_pair import write_draft

# In float32 a near tie could go either way.
TEXT_KINDS = [kind for kind in KINDS if DTYPE[kind] == torch.float64]
PROMPTS = [[1, 2, 3], [7], [5, 4, 3, 2, 1, 0, 6, 8, 9]]
TOKENS = 40


@pytest.fixture(scope="module", params=TEXT_KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("pair")
    # A seed at which some of a random draft's tokens are accepted.
    target = write(directory / "target", request.param, seed=2 if request.param == "gemma2" else 0)
    return target, write_draft(directory / "draft", VOCAB, block_size=5)


def generated(path: Path, prompt: list[int]) -> list[int]:
    """transformers' own greedy text."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    assert model.dtype == torch.float64
    ids = torch.tensor([prompt])
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, **options)
    return list(map(int, text[0, len(prompt) :]))


@pytest.mark.parametrize("acceptance", ["rejection", "block", "coupled"])
def test_greedy_text_is_that_of_transformers(pair: tuple[Path, Path], acceptance: str) -> None:
    target, draft = pair
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0)
    with DSparkDecoder.from_pretrained(
        target, draft, policy="fixed", acceptance=acceptance, device="cpu"
    ) as decoder:
        results = decoder.generate(PROMPTS, params)
        stats, info = decoder.stats(), decoder.info()
    assert stats["drafted"] > 0 and stats["accepted"] > 0
    assert info["target_runs_through"].startswith("transformers ")
    assert info["attention"] == f"that of {info['target_runs_through']}"
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert list(result.token_ids) == generated(target, prompt)


def test_coupled_text_needs_no_draft(pair: tuple[Path, Path], tmp_path: Path) -> None:
    target, draft = pair
    other = write_draft(tmp_path / "other", VOCAB, head="rnn", block_size=4, seed=5)
    params = [SamplingParams(max_tokens=30, temperature=1.0, top_p=0.95, seed=s) for s in range(6)]
    texts = []
    for each in (None, draft, other):
        with DSparkDecoder.from_pretrained(
            target, each, policy="fixed", acceptance="coupled", device="cpu"
        ) as decoder:
            texts.append([r.token_ids for r in decoder.generate(PROMPTS * 2, params)])
            assert each is None or decoder.stats()["accepted"] > 0
    assert texts[0] == texts[1] == texts[2]


def test_native_targets_say_so() -> None:
    assert Models.load("tiny", None, device="cpu").info()["target_runs_through"] == "dspark"


AUDITED = Plan(tokens=16, samples=8)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    directory = tmp_path_factory.mktemp("audited")
    target = write(directory / "target", "mistral-window")
    return Models.load(target, write_draft(directory / "draft", VOCAB), device="cpu")


@pytest.mark.parametrize("acceptance", ["rejection", "block", "coupled"])
def test_an_adapted_pair_passes_the_audit(models: Models, acceptance: str) -> None:
    report = audit_pair(models, Options(policy="fixed", acceptance=acceptance), PROMPTS, AUDITED)
    assert report.failures() == []
    assert report.verdict == "pass"


def test_the_audit_sees_a_cache_that_keeps_a_rejected_token(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = Runner.commit

    def faulty(self: Runner, ids: list[int], kept: list[int]) -> None:
        width = dict(self._verified)
        commit(self, ids, [min(n + 1, width[request]) for request, n in zip(ids, kept, strict=True)])

    monkeypatch.setattr(Runner, "commit", faulty)
    # Without limits: a cache that keeps more than the core counts would soon run out of its room.
    monkeypatch.setattr(Runner, "reserve", lambda self, ids, positions: None)
    report = audit_pair(models, Options(policy="fixed"), PROMPTS, AUDITED)
    assert report.verdict == "fail"
    assert report.greedy.beyond_rounding > 0


def test_the_command_passes_on_an_adapted_pair(tmp_path: Path) -> None:
    target = write(tmp_path / "target", "phi3")
    words = Tokenizer(WordLevel({letter: i for i, letter in enumerate("abcdefghijklm")}, unk_token="a"))
    words.pre_tokenizer = WhitespaceSplit()
    words.save(str(target / "tokenizer.json"))
    draft = write_draft(tmp_path / "draft", VOCAB)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "b c d"}\n{"prompt": "m k f f"}\n')
    work = ("--prompts", prompts, "--tokens", 24, "--samples", 8, "--device", "cpu", "--json")
    code, out, err = run_command("audit", "--target", target, "--draft", draft, *work)
    assert (code, err) == (0, ""), out
    assert json.loads(out)["verdict"] == "pass"
