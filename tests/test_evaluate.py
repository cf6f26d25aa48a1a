"""`dspark evaluate`: its baselines and numbers by hand, and the whole of it on the embedded pair."""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from commandline import run
from dspark import SamplingParams
from dspark.calibrate.prompts import digest, standard_library
from dspark.calibrate.rollout import Plan
from dspark.checkpoint.calibration import Regime, read_calibrations, write_calibrations
from dspark.cli import calibrate, evaluate
from dspark.core import Noise, accept
from dspark.decoder import DSparkDecoder
from dspark.evaluate.answers import Answer, by_prompt, ratio
from dspark.evaluate.head import Head
from dspark.evaluate.ngram import Lookup, lookup_rounds
from dspark.evaluate.numbers import measure
from dspark.evaluate.plots import bars
from dspark.evaluate.report import main_rows, tables
from dspark.evaluate.run import Evaluated, evaluate_pair, without_markov
from dspark.pretrained import resolve
from dspark.result import Round
from dspark.serve.models import Models
from dspark.serve.options import Options

QUICK = ("--tokens", "24", "--device", "cpu", "--dtype", "float32")


def test_lookup_proposes_what_followed_the_longest_run():
    text = Lookup([1, 2, 3, 4, 9, 3, 5, 1, 2, 3])
    # 1 2 3 was followed by 4 9 3 5; its shorter ends 2 3 and 3 (followed by 5 later) give way to it.
    assert text.propose(4) == [4, 9, 3, 5]
    assert text.propose(2) == [4, 9]
    text.push(7)
    assert text.propose(4) == []  # 7 is new
    text.push(3)
    assert text.propose(3) == [7, 3]  # after the latest 3 that something follows, up to the end of the text


def test_lookup_goes_by_the_latest_occurrence_and_not_by_itself():
    text = Lookup([1, 2, 5, 1, 2, 6, 1, 2])
    assert text.propose(1) == [6]
    assert Lookup([4]).propose(3) == [] and Lookup([]).propose(3) == []
    assert Lookup([4, 4]).propose(3) == [4]


def test_lookup_rounds_by_hand():
    #        prompt            the prefill's token 1, then 2 3 4 8, then 1 2 3
    rounds = lookup_rounds([1, 2, 3, 4], [1, 2, 3, 4, 8, 1, 2, 3], 3, max_tokens=8)
    shown = [(r.drafted, r.verified, r.accepted, r.committed) for r in rounds]
    # 2 3 4 is proposed and kept, 8 the bonus; nothing is known after 8; 2 alone, as there is room for two.
    assert shown == [(3, 3, 3, 4), (0, 0, 0, 1), (1, 1, 1, 2)]
    assert 1 + sum(r.committed for r in rounds) == 8


def test_lookup_rounds_end_with_the_text():
    # The text ends by its own token 3 although there would be room: nothing is committed after it.
    rounds = lookup_rounds([1, 2, 3, 4], [1, 2, 3], 3, max_tokens=50)
    assert [(r.drafted, r.accepted, r.committed) for r in rounds] == [(3, 2, 2)]
    assert lookup_rounds([1], [5], 3, max_tokens=50) == ()


def test_a_certain_proposal_is_accepted_as_often_as_the_target_draws_it():
    """What the lookup drafter's rounds rest on, by the acceptance rule itself."""
    p = np.array([0.5, 0.3, 0.2])
    certain = np.full((1, 3), -np.inf)
    certain[0, 1] = 0.0
    rows, params = np.log(np.tile(p, (2, 1))), SamplingParams(temperature=1.0)
    outcomes = [accept(rows, [1], certain, "rejection", params, Noise(seed, 1)) for seed in range(6000)]
    first = np.array([1 if accepted else token for accepted, token in outcomes])
    counts = np.bincount(first, minlength=3)
    assert (((counts - 6000 * p) ** 2) / (6000 * p)).sum() < 13.8  # chi-square, 2 degrees, 1 in 1000
    assert sum(accepted for accepted, _ in outcomes) == counts[1]


def an_answer(prompt, rounds, tokens=10, seconds=1.0, looping=False):
    rounds = tuple(Round(3, v, a, (), c) for v, a, c in rounds)
    return Answer(prompt, tokens, rounds, seconds, looping)


def test_numbers_by_hand():
    draft = [
        an_answer(0, [(3, 3, 4), (3, 0, 1), (2, 1, 2)], tokens=8, seconds=2.0),
        an_answer(1, [(3, 2, 2)], tokens=3, seconds=1.0, looping=True),
    ]
    plain = [an_answer(0, [], tokens=8, seconds=4.0), an_answer(1, [], tokens=3, seconds=1.5)]
    measured = measure(draft, plain, 3)
    n = measured.every
    assert n.acceptance_length_pooled.value == pytest.approx(9 / 4)
    assert n.acceptance_length_mean_of_requests.value == pytest.approx((7 / 3 + 2) / 2)
    assert n.verified_per_round == pytest.approx(11 / 4) and n.verify_rate == pytest.approx(11 / 4 / 3)
    # The last round ended its text at its second token: its third is not judged.
    assert n.acceptance_rate == pytest.approx(6 / 10)
    assert [(p.reached, p.accepted) for p in n.positions] == [(4, 3), (3, 2), (1, 1)]
    assert [p.survival for p in n.positions] == pytest.approx([3 / 4, 2 / 4, 1 / 2])
    assert n.tokens_per_second.value == pytest.approx(11 / 3)
    assert n.over_plain.value == pytest.approx(5.5 / 3)
    assert measured.looping == 0.5
    straight, circling = measured.without_looping, measured.of_looping
    assert straight.acceptance_length_pooled.value == pytest.approx(7 / 3)
    assert straight.tokens_per_second.value == pytest.approx(4) and straight.over_plain.value == 2.0
    assert [(p.reached, p.accepted) for p in straight.positions] == [(3, 2), (2, 1), (1, 1)]
    assert circling.acceptance_length_pooled.value == pytest.approx(2.0) and circling.over_plain.value == 1.5
    alone = measure(plain, plain, 3)
    assert alone.of_looping is None and alone.without_looping.over_plain is None
    alone = alone.every
    assert alone.acceptance_length_pooled is None and alone.over_plain is None and alone.positions == ()


def test_rounds_without_a_draft_are_counted_and_told_apart():
    rounds = (Round(3, 2, 1, (), 2), Round(0, 0, 0, (), 1), Round(1, 1, 1, (), 2), Round(0, 0, 0, (), 1))
    answers = [Answer(0, 6, rounds, 1.0, False)]
    n = measure(answers, [an_answer(0, [])], 3).every
    assert (n.rounds, n.rounds_without_draft, n.share_without_draft) == (4, 2, 0.5)
    assert n.verified_per_round == pytest.approx(3 / 4) and n.verify_rate == pytest.approx(3 / 12)
    assert n.acceptance_length_pooled.value == pytest.approx(6 / 4)


def test_gains_without_looping_are_of_requests_that_loop_on_neither_side():
    draft = [an_answer(p, [(3, 1, 2)], looping=p == 0) for p in range(3)]
    plain = [an_answer(p, [], seconds=2.0 + p, looping=p == 1) for p in range(3)]
    straight = measure(draft, plain, 3).without_looping
    assert straight.answers == 2 and straight.tokens_per_second.value == pytest.approx(10)
    assert straight.over_plain.value == pytest.approx(4.0)  # of the third alone
    every = [replace(answer, looping=True) for answer in draft]
    assert measure(every, plain, 3).without_looping is None


@pytest.mark.parametrize("prompts", [1, 2, 3])
def test_few_prompts_have_no_interval(prompts):
    answers = [an_answer(p, [(3, p, p + 1)] * 2) for p in range(prompts) for _ in range(2)]
    found = measure(answers, answers, 3)
    pooled = found.every.acceptance_length_pooled
    assert pooled.value == pytest.approx((prompts + 1) / 2)
    has_one = prompts >= 3
    assert (pooled.low is not None, pooled.high is not None) == (has_one, has_one)
    shown = Evaluated(Regime(acceptance="rejection", temperature=0.0), {"all": {"draft": found}}, NO_HEAD)
    assert ("[-]" in main_rows(shown)[1][4]) is not has_one
    bars(shown, "acceptance_length_pooled")


NO_HEAD = Head(None, None, "none")


def test_tables_without_looping_answers_are_there_where_some_loop():
    straight = [an_answer(p, [(3, 1, 2)]) for p in range(3)]
    for looping in (False, True):
        draft = [replace(straight[0], looping=looping), *straight[1:]]
        methods = {"plain": measure(straight, straight, 3), "draft": measure(draft, straight, 3)}
        shown = Evaluated(Regime(acceptance="rejection", temperature=0.0), {"all": methods}, NO_HEAD)
        found = dict(tables(shown))
        speed = found.get("Acceptance and speed, without looping answers")
        positions = found.get("Acceptance by position, all data sets, without looping answers")
        assert (speed is not None, positions is not None) == (looping, looping)
    assert [row[2] for row in speed[1:]] == ["3", "2"]
    assert max(map(len, map("  ".join, [row for _, rows in found.items() for row in rows]))) < 170


def test_intervals_cover_the_truth_as_often_as_they_say():
    generator = np.random.default_rng(5)
    covered = 0
    for _ in range(200):
        below = generator.integers(5, 15, 60).astype(float)
        above = below * generator.normal(2.0, 0.5, 60)
        estimate = ratio([above], [below])
        assert estimate.low < estimate.value < estimate.high
        covered += estimate.low < 2.0 < estimate.high
    assert 178 <= covered <= 199  # 95 % of 200, within 4 standard errors


def test_sums_are_by_prompt():
    answers = [an_answer(4, []), an_answer(2, []), an_answer(4, [])]
    assert by_prompt(answers, [2, 4], lambda a: a.tokens).tolist() == [10, 20]
    assert ratio([np.zeros(0)], [np.zeros(0)]) is None


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    directory = tmp_path_factory.mktemp("prompts")
    texts = standard_library()[:6]
    for name, part in (("one", texts[:3]), ("two", texts[3:])):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps({"turns": [t]}) + "\n" for t in part))
    return ("--prompts", directory / "one.jsonl", "--prompts", directory / "two.jsonl")


def test_the_block_drafter_has_no_chain():
    """Its tokens are those of a chain whose Markov bias is zero, and the text is the target's own."""
    models = Models.load("tiny", "tiny-draft", dtype="float32")
    bare = without_markov(models)
    assert set(models.heads()) == {"markov", "confidence"} and bare.heads() == {}
    params = SamplingParams(temperature=0.0, max_tokens=40)
    texts, lengths = [], []
    for loaded in (models, bare):
        with DSparkDecoder(lambda loaded=loaded: loaded, Options(policy="fixed")) as decoder:
            result = decoder.generate("import os\n", params)
        texts.append(result.token_ids)
        lengths.append(result.acceptance_length)
    assert texts[0] == texts[1] and lengths[0] != lengths[1]


class Page(HTMLParser):
    """Counts what is in it, and sees that what is opened is closed."""

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], {}

    def handle_starttag(self, tag, attrs):
        self.seen[tag] = self.seen.get(tag, 0) + 1
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen[tag] = self.seen.get(tag, 0) + 1

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_evaluates_the_embedded_pair(prompts, tmp_path):
    page = tmp_path / "report.html"
    code, out, err = run("evaluate", *prompts, *QUICK, "--html", page, "--json")
    assert (code, err) == (0, "")
    said = json.loads(out)
    assert [r["temperature"] for r in said["regimes"]] == [0.0, 0.7]
    for regime in said["regimes"]:
        assert list(regime["data_sets"]) == ["one", "two", "all"]
        for methods in regime["data_sets"].values():
            assert list(methods) == ["plain", "draft", "block", "ngram"]
            assert methods["plain"]["acceptance_length_pooled"] is None
            for drafter in ("draft", "block", "ngram"):
                pooled = methods[drafter]["acceptance_length_pooled"]
                assert 1 <= pooled["low"] <= pooled["value"] <= pooled["high"] <= 8
                assert methods[drafter]["acceptance_length_mean_of_requests"]["value"] >= 1
                assert len(methods[drafter]["acceptance_by_position"]) == 7
            assert methods["draft"]["over_plain"]["value"] > 0 and methods["block"]["over_plain"] is None
            assert 0.7 < methods["draft"]["verify_rate"] < 1.0  # the last rounds of 24 tokens are short
            assert methods["draft"]["verified_per_round"] == pytest.approx(
                7 * methods["draft"]["verify_rate"]
            )
            assert methods["ngram"]["rounds_without_draft"] > 0 and methods["ngram"]["verify_rate"] < 1
            assert methods["draft"]["without_looping"]["tokens_per_second"]["value"] > 0
        both = [regime["data_sets"][name]["draft"]["answers"] for name in ("one", "two", "all")]
        assert both == [3, 3, 6]
        head = regime["confidence_head"]
        assert len(head["survival"]) == 7 and 0 <= head["overall"]["ece"] <= 1
        assert regime["confidence_head_calibrated"] is not None  # the embedded draft has a calibration
    greedy = said["regimes"][0]["data_sets"]["all"]
    assert greedy["plain"]["tokens"] == greedy["draft"]["tokens"] == greedy["block"]["tokens"]
    parsed = Page()
    parsed.feed(page.read_text())
    assert parsed.open == [] and parsed.seen["svg"] == 2 * 4 and parsed.seen["table"] == 1 + 2 * 3


def test_every_drafter_drafts_as_much_as_was_asked_for(prompts):
    code, out, _ = run("evaluate", *prompts, *QUICK, "--temperature", "0", "--block-size", "3", "--json")
    [regime] = json.loads(out)["regimes"]
    assert code == 0 and len(regime["confidence_head"]["survival"]) == 3
    for drafter in ("draft", "block", "ngram"):
        found = regime["data_sets"]["all"][drafter]
        assert len(found["acceptance_by_position"]) == 3
        assert found["acceptance_length_pooled"]["high"] <= 4
    assert regime["confidence_head_calibrated"] is not None


def test_lookup_drafts_no_more_than_the_draft(tmp_path):
    again = tmp_path / "again.jsonl"
    again.write_text(json.dumps({"prompt": "    x = x + 1\n" * 20}) + "\n")
    how = ("--prompts", again, "--temperature", "0", "--block-size", "1", "--json")
    _, out, _ = run("evaluate", *QUICK, *how)
    found = json.loads(out)["regimes"][0]["data_sets"]["all"]["ngram"]
    assert 1 < found["acceptance_length_pooled"]["value"] <= 2


def test_a_cut_hides_what_the_confidences_are_worth(prompts):
    how = ("--policy", "threshold", "--confidence-threshold", "0.5", "--temperature", "0")
    code, out, _ = run("evaluate", *prompts, *QUICK, *how, "--json")
    [regime] = json.loads(out)["regimes"]
    assert code == 0 and regime["data_sets"]["all"]["draft"]["acceptance_rate"] > 0
    assert regime["confidence_head"] is regime["confidence_head_calibrated"] is None


def test_the_default_policy_is_evaluated_too(prompts, tmp_path):
    page = tmp_path / "report.html"
    how = ("--policy", "throughput", "--temperature", "0", "--html", page, "--json")
    code, out, err = run("evaluate", *prompts, *QUICK, *how)
    assert code == 0, err
    said = json.loads(out)
    [regime] = said["regimes"]
    found = regime["data_sets"]["all"]["draft"]
    assert 0 <= found["rounds_without_draft"] <= found["rounds"] and 0 <= found["verify_rate"] <= 1
    assert regime["confidence_head"] is None and '"throughput" hides' in regime["confidence_head_note"]
    assert said["info"]["policy"] == "throughput" and said["info"]["plan"]["tokens"] == 24
    assert "source: calibration.json" in page.read_text()


def test_a_data_set_is_not_taken_for_all_of_them(prompts, tmp_path):
    named = tmp_path / "all.jsonl"
    named.write_text('{"prompt": "import os"}\n')
    code, _, err = run("evaluate", *prompts, "--prompts", named, *QUICK)
    assert code == 2 and "cannot be called all" in err


def test_no_prefill_is_saved_by_earlier_answers():
    """Neither of another regime, nor of the same one, nor by what warms up."""
    reused = []

    class Watched(DSparkDecoder):
        def generate(self, *arguments):
            result = super().generate(*arguments)
            reused.append(result.reused_tokens)
            return result

    texts = {"one": standard_library()[:2]}
    regimes = [SamplingParams(temperature=t) for t in (0.0, 0.7)]
    models = Models.load("tiny", "tiny-draft", dtype="float32")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dspark.evaluate.run.DSparkDecoder", Watched)
        plan = Plan(tokens=4, samples=2)
        evaluate_pair(models, texts, regimes, plan, Options(policy="fixed", max_batch_size=1))
    assert len(reused) == 3 * 6 + 2 * 3 and sum(reused[: 3 * 6]) == 0  # the block drafter is not timed


def noted(tmp_path, texts, fitted_prompts):
    """Evaluates on these texts with a calibration fitted to those prompts: the regime."""
    draft, file = tmp_path / "draft", tmp_path / "some.jsonl"
    if not draft.exists():
        shutil.copytree(resolve("tiny-draft", "draft"), draft)
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    [first, *_] = read_calibrations(resolve("tiny-draft", "draft") / "calibration.json")
    write_calibrations(draft / "calibration.json", [replace(first, fitted_prompts=tuple(fitted_prompts))])
    how = ("--draft", draft, "--prompts", file, "--temperature", "0", "--json")
    code, out, err = run("evaluate", *QUICK, *how)
    assert code == 0, err
    [regime] = json.loads(out)["regimes"]
    return regime


def test_calibrated_scores_are_of_prompts_that_were_not_fitted_to(tmp_path):
    models = Models.load("tiny", "tiny-draft", dtype="float32")
    texts = standard_library()[:4]
    digests = [digest(models.tokens(text)) for text in texts]
    part = noted(tmp_path, texts, digests[::2])
    assert "on the 2 of 4 prompts that" in part["confidence_head_note"]
    # The very rounds of the others: raw and calibrated scores can be compared.
    alone = noted(tmp_path, texts[1::2], digests[::2])
    assert "on the 2 of 2 prompts that" in alone["confidence_head_note"]
    for scores in ("confidence_head", "confidence_head_calibrated"):
        assert part[scores] == alone[scores]
    every = noted(tmp_path, texts, digests)
    assert "fitted to each of these prompts" in every["confidence_head_note"]
    assert every["confidence_head_calibrated"] is None
    assert every["confidence_head"]["overall"]["count"] > part["confidence_head"]["overall"]["count"]
    unknown = noted(tmp_path, texts, ())
    assert "does not say which prompts" in unknown["confidence_head_note"]
    assert (
        unknown["confidence_head_calibrated"]["overall"]["count"]
        == every["confidence_head"]["overall"]["count"]
    )


def test_evaluation_draws_what_calibration_did_not():
    parsed = {}
    for command in (calibrate, evaluate):
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        parsed[command] = parser.parse_args([])
    fitted = parsed[calibrate]
    assert parsed[evaluate].seed > fitted.seed + 1000 * fitted.samples * len(standard_library())


@pytest.mark.parametrize("command", ["calibrate", "evaluate"])
def test_a_prompt_that_does_not_fit_is_named_before_anything_is_run(command, prompts, tmp_path, monkeypatch):
    monkeypatch.setattr(DSparkDecoder, "generate", None)
    long = tmp_path / "long.jsonl"
    long.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("a = 1\n", "a = 1\n" * 256)))
    output = ("--output", tmp_path / "calibration.json") if command == "calibrate" else ()
    code, out, err = run(
        command, *prompts, "--prompts", long, *QUICK, "--max-model-len", "500", *output, "--json"
    )
    assert code == 2
    assert "data set long, prompt 2 has" in out + err and "context window of 500" in out + err


def test_prints_tables(prompts):
    code, out, _ = run("evaluate", *prompts, *QUICK, "--temperature", "0", "--acceptance", "coupled")
    assert code == 0 and "acceptance length (pooled)" in out and "(mean of requests)" in out
    assert "coupled, temperature 0" in out and "confidence head" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--no-draft",), "nothing to evaluate"),
        (("--html", "/nowhere/report.html"), "name a file in a directory that is there"),
        (("--prompts", "/nowhere.jsonl"), "/nowhere.jsonl cannot be read"),
        (("--tokens", "0"), "tokens must be at least 1"),
        (("--policy", "threshold"), "needs a confidence_threshold"),
    ],
)
def test_refused_before_the_work(flags, message):
    code, _, err = run("evaluate", *flags)
    assert code == 2 and message in err and "Traceback" not in err
