"""`dspark audit` on the embedded pair: it passes as it is, and fails with a fault planted in the engine."""

import json
from dataclasses import replace

import pytest
import torch

from dspark.audit.coupled import check_coupled
from dspark.audit.greedy import check_greedy
from dspark.audit.prompts import CODE, GENERAL
from dspark.audit.reference import Reference
from dspark.audit.run import audit_pair
from dspark.calibrate.rollout import Plan
from dspark.decoder import DSparkDecoder
from dspark.errors import RequestError
from dspark.prompts import read_prompts
from dspark.result import Round
from dspark.sampling import SamplingParams
from dspark.serve.models import Models
from dspark.serve.options import Options
from dspark.serve.runner import Runner
from results import result_of

PLAN = Plan(tokens=32, samples=8)
PROMPTS = CODE[:4]


@pytest.fixture(scope="module")
def models():
    return Models.load("tiny", "tiny-draft", dtype="float32")


def audit(models, options=None, plan=PLAN):
    return audit_pair(models, options or Options(policy="fixed"), PROMPTS, plan)


def test_reference_rows_are_its_single_rows(models):
    reference = Reference(models.target)
    prompt, output = [5, 6, 7], [8, 9, 10, 11]
    rows = reference.rows(prompt, output)
    assert rows.dtype == torch.float64 and rows.shape == (4, models.target.config.vocab_size)
    for i in range(4):
        torch.testing.assert_close(rows[i], reference.next_row(prompt + output[:i]), atol=1e-4, rtol=0)


def test_the_window_may_be_smaller_than_the_model_s(models):
    """Texts end where the options say, which is no fault."""
    longest = max(len(models.tokens(prompt)) for prompt in PROMPTS)
    report = audit(models, Options(policy="fixed", max_model_len=longest + 20))
    assert not any("it should have" in failure for failure in report.failures())


@pytest.mark.parametrize("acceptance", ["rejection", "block", "coupled"])
def test_the_embedded_pair_passes(models, acceptance):
    report = audit(models, Options(policy="fixed", acceptance=acceptance))
    assert report.failures() == []
    assert report.gaps() == []
    assert report.verdict == "pass"
    assert report.greedy.counts.tokens == 4 * 32
    assert [check.name for check in report.sampled] == [
        "temperature 1",
        "temperature 1, cut at 0.5",
        "temperature 0.8, top-p 0.9",
    ]
    cut = report.sampled[1].counts
    assert 0 < cut.drafted < report.sampled[0].counts.drafted
    assert len(report.coupled) == (3 if acceptance == "coupled" else 0)
    assert all(text.equal == 4 * 8 * 32 for text in report.coupled)
    written = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert written["verdict"] == "pass" and written["greedy"]["equal"] == 128
    assert len(written["shown"]) == 4 + len(report.coupled) and written["not_shown"]


@pytest.mark.parametrize(("dtype", "has_bound"), [("float64", False), ("bfloat16", True)])
def test_other_dtypes_pass_with_their_own_bound(dtype, has_bound):
    report = audit(Models.load("tiny", "tiny-draft", dtype=dtype))
    assert report.verdict == "pass"
    assert (report.greedy.largest_bound > 1e-2) == has_bound
    assert (report.greedy.undecided > 0) == has_bound
    assert report.greedy.differences == () or has_bound


class KeepsEveryDraft:
    """The verify pass says that each drafted token is certain, so all are kept."""

    @staticmethod
    def verify(rows, tokens, lengths):
        start = 0
        for length in lengths:
            for row in range(start, start + length - 1):
                rows[row] = 0
                rows[row, tokens[row + 1]] = 1e4
            start += length
        return rows


class GreedyBonus:
    """The row after the last drafted token is so sharp that the bonus is its argmax."""

    @staticmethod
    def verify(rows, tokens, lengths):
        ends = torch.tensor(lengths).cumsum(0) - 1
        rows[ends] *= 1e4
        return rows


class TooSharp:
    """Every row is a little too sharp: temperature 0.8 in place of 1."""

    @staticmethod
    def verify(rows, tokens, lengths):
        return rows / 0.8


@pytest.mark.parametrize(
    ("fault", "shows_at_0"), [(KeepsEveryDraft, True), (GreedyBonus, False), (TooSharp, False)]
)
def test_a_fault_in_the_verified_rows_fails(models, monkeypatch, fault, shows_at_0):
    verify = Runner.verify

    def faulty(self, ids, tokens, lengths):
        return fault.verify(verify(self, ids, tokens, lengths).clone(), tokens, lengths)

    monkeypatch.setattr(Runner, "verify", faulty)
    report = audit(models)
    assert report.verdict == "fail"
    assert any(check.failures() for check in report.sampled)
    assert bool(report.greedy.failures()) == shows_at_0
    for check in report.sampled:
        assert (len([line for line in report.shown() if line.startswith(check.name + ":")]) == 0) == bool(
            check.failures()
        )


def test_a_cache_that_keeps_a_rejected_token_fails(models, monkeypatch):
    commit = Runner.commit

    def faulty(self, ids, kept):
        width = dict(self._verified)
        commit(self, ids, [min(n + 1, width[request]) for request, n in zip(ids, kept, strict=True)])

    monkeypatch.setattr(Runner, "commit", faulty)
    # Without limits: a cache that keeps more than the core counts would soon run out of its room.
    monkeypatch.setattr(Runner, "reserve", lambda self, ids, positions: None)
    report = audit(models)
    assert report.verdict == "fail"
    assert report.greedy.beyond_rounding > 0
    assert "rounding explains 0.0001" in report.failures()[0]


def test_a_text_that_is_not_that_of_its_noise_fails(models):
    """Texts of the rule `rejection` follow the target's law, and are not those that `coupled` promises."""
    params = SamplingParams(max_tokens=32, temperature=1.0, seed=1, n=2)
    with DSparkDecoder(lambda: models, Options(policy="fixed")) as decoder:
        results = decoder.generate(PROMPTS[0], params)
    found = check_coupled("text", results, 2, params, Reference(models.target), lambda *_: None)
    assert found.equal + found.within_rounding + len(found.beyond_rounding) == 64
    assert len(found.beyond_rounding) > 10 and "text: " in found.failures()[0]

    class Rough(Reference):
        def bound(self, row):
            return 1e3

    found = check_coupled("text", results, 2, params, Rough(models.target), lambda *_: None)
    assert found.within_rounding > 10 and found.failures() == []


def test_drafts_that_are_never_accepted_are_inconclusive(models, monkeypatch):
    draft = Runner.draft

    def useless(self, ids, anchors):
        base, hidden = draft(self, ids, anchors)
        base = torch.zeros_like(base)
        base[:, 1] = 1e4  # the mask token, which the target never says
        return base, hidden

    monkeypatch.setattr(Runner, "draft", useless)
    report = audit(models, Options(policy="threshold", confidence_threshold=0.0))
    assert report.failures() == []
    assert report.verdict == "inconclusive"
    assert "none of" in report.gaps()[0] and len(report.gaps()) == 3


def test_no_draft_is_inconclusive(models):
    report = audit(replace(models, draft=None))
    assert report.verdict == "inconclusive"
    names = ["temperature 0", "temperature 1", "temperature 0.8, top-p 0.9"]
    assert report.gaps() == [f"{name}: nothing was drafted" for name in names]


def test_too_few_tokens_to_test_are_inconclusive(models):
    """Each run has drafts and accepts some, and below 50 tokens no test: that is no pass."""
    report = audit_pair(models, Options(policy="fixed"), PROMPTS[:2], Plan(tokens=20, samples=1))
    assert report.failures() == [] and all(check.counts.accepted for check in report.sampled)
    assert report.verdict == "inconclusive"
    names = ["temperature 1", "temperature 1, cut at 0.5", "temperature 0.8, top-p 0.9"]
    assert report.gaps() == [f"{name}: 40 tokens are too few to test" for name in names]
    assert [line.split(":")[0] for line in report.shown()] == ["temperature 0"]


def test_a_failure_outweighs_a_gap(models, monkeypatch):
    monkeypatch.setattr(Runner, "verify", lambda self, *a, _verify=Runner.verify: -_verify(self, *a))
    report = audit(replace(models, draft=None))
    assert report.gaps() and report.verdict == "fail"


class TwoTokenReference:
    """Logits 1 and 1 + gap for two tokens."""

    def __init__(self, gap):
        self.gap = gap

    def next_row(self, text):
        return torch.tensor([1.0, 1.0 + self.gap], dtype=torch.float64)

    def bound(self, row):
        return 1e-4


@pytest.mark.parametrize(
    ("gap", "differences", "beyond", "undecided"), [(0.0, 0, 0, 1), (5e-5, 1, 0, 1), (2e-4, 1, 1, 0)]
)
def test_a_difference_is_judged_by_its_margin(gap, differences, beyond, undecided):
    results = [result_of([1], [0], [])]
    found = check_greedy(results, TwoTokenReference(gap), (), lambda *_: None)
    assert (len(found.differences), found.beyond_rounding, found.undecided) == (
        differences,
        beyond,
        undecided,
    )
    assert bool(found.failures()) == bool(beyond)
    assert found.smallest_gap == pytest.approx(gap)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"token_ids": (3, 4, 5)}, "it should have 8"),
        ({"finish_reason": "stop"}, "finish_reason 'stop'"),
        ({"token_ids": (3, 0, 4, 5, 6, 7, 8, 9)}, "it should have 2"),
        ({"rounds": (Round(1, 1, 0, (), 1),)}, "its rounds committed 1"),
    ],
)
def test_wrong_ends_and_counts_fail(models, monkeypatch, change, words):
    generate = DSparkDecoder.generate

    def faulty(self, prompts, params):
        return [
            replace(r, **change) if not isinstance(r, list) else r for r in generate(self, prompts, params)
        ]

    monkeypatch.setattr(DSparkDecoder, "generate", faulty)
    report = audit_pair(models, Options(policy="fixed"), ["import os\n"], Plan(tokens=8, samples=2))
    assert report.verdict == "fail"
    assert any(words in line for line in report.failures())


def test_prompts_have_noise_of_their_own(models):
    """One seed for all prompts would give their tokens at equal positions the same noise."""
    seeds = []

    class Recorder(DSparkDecoder):
        def generate(self, prompts, params):
            seeds.extend(p.seed for p in params)
            return super().generate(prompts, params)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dspark.audit.run.DSparkDecoder", Recorder)
        audit(models, plan=Plan(tokens=2, samples=2))
    assert len(seeds) == len(set(seeds)) == 16


def test_the_audit_overrides_the_generation_config(models):
    """A repetition penalty in the target's generation_config.json is no part of the law that is tested."""
    config = {"repetition_penalty": 1.5, "top_k": 3, "do_sample": False}
    report = audit(replace(models, generation_config=config))
    assert report.verdict == "pass"
    with DSparkDecoder(lambda: replace(models, generation_config=config), Options(policy="fixed")) as decoder:
        penalised = decoder.generate(PROMPTS[0], SamplingParams(max_tokens=32))
        plain = decoder.generate(PROMPTS[0], SamplingParams(max_tokens=32, repetition_penalty=1.0))
    assert penalised.token_ids != plain.token_ids  # so the config does matter


@pytest.mark.parametrize("plan", [{"tokens": 0}, {"samples": -1}, {"seed": -1}, {"seed": 1 << 63}])
def test_a_plan_out_of_range_is_refused(plan):
    with pytest.raises(RequestError, match=f"{next(iter(plan))} must be"):
        Plan(**plan)


def test_prompts_from_a_file(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one"}\n\n{"question_id": 81, "turns": ["two", "three"]}\n')
    assert read_prompts(file) == ["one", "two"]
    for bad, words in [("{", "line 1: not JSON"), ('{"text": 1}', "line 1: expected"), ("", "no prompts")]:
        file.write_text(bad)
        with pytest.raises(RequestError, match=words):
            read_prompts(file)
    with pytest.raises(RequestError, match="cannot be read"):
        read_prompts(tmp_path / "none")


def test_built_in_prompts_are_different_texts():
    assert len(set(CODE + GENERAL)) == 16
