"""`dspark evaluate` on the embedded pair."""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from commandline import run
from dspark import SamplingParams
from dspark.calibrate.prompts import digest, standard_library
from dspark.calibrate.rollout import Plan
from dspark.checkpoint.calibration import read_calibrations, write_calibrations
from dspark.cli import calibrate, evaluate
from dspark.core import CostTable
from dspark.decoder import DSparkDecoder
from dspark.evaluate.run import Evaluator, without_markov
from dspark.pretrained import resolve
from dspark.serve.models import Models
from dspark.serve.options import Options

QUICK = ("--tokens", "24", "--device", "cpu", "--dtype", "float32")


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
    # Nor has it one on a GPU, where kernels draw with the draft's own heads.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Models, "_sampler", lambda _: "the kernels'")
        assert (models.runner().sampler, bare.runner().sampler) == ("the kernels'", None)
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
            rate, each = (methods["draft"][name] for name in ("verify_rate", "verified_per_round"))
            assert 0.7 < rate["low"] < rate["value"] < 1.0  # the last rounds of 24 tokens are short
            assert list(each.values()) == pytest.approx([7 * bound for bound in rate.values()])
            assert methods["ngram"]["rounds_without_draft"] > 0
            assert methods["ngram"]["verify_rate"]["value"] < 1
            first = methods["draft"]["acceptance_by_position"][0]
            assert 0 < first["rate"]["low"] < first["rate"]["value"] < first["rate"]["high"] <= 1
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
    page = tmp_path / "page.html"
    _, out, _ = run("evaluate", *QUICK, *how, "--html", page)
    said = json.loads(out)
    found = said["regimes"][0]["data_sets"]["all"]["ngram"]
    assert 1 < found["acceptance_length_pooled"]["value"] <= 2
    # Of one set alone the tables have no name.
    assert said["info"]["data_sets"] == {"again": 1}
    assert "<th>data_sets</th><td>again: 1</td>" in page.read_text()


def test_a_cut_hides_what_the_confidences_are_worth(prompts):
    how = ("--policy", "threshold", "--confidence-threshold", "0.5", "--temperature", "0")
    code, out, _ = run("evaluate", *prompts, *QUICK, *how, "--json")
    [regime] = json.loads(out)["regimes"]
    assert code == 0 and regime["data_sets"]["all"]["draft"]["acceptance_rate"]["value"] > 0
    assert regime["confidence_head"] is regime["confidence_head_calibrated"] is None


def test_the_default_policy_is_evaluated_too(prompts, tmp_path):
    page = tmp_path / "report.html"
    how = ("--policy", "throughput", "--temperature", "0", "--html", page, "--json")
    code, out, err = run("evaluate", *prompts, *QUICK, *how)
    assert code == 0, err
    said = json.loads(out)
    [regime] = said["regimes"]
    found = regime["data_sets"]["all"]["draft"]
    assert 0 <= found["rounds_without_draft"] <= found["rounds"] and 0 <= found["verify_rate"]["value"] <= 1
    assert regime["confidence_head"] is None and '"throughput" leaves out' in regime["confidence_head_note"]
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
        list(Evaluator(models, texts, regimes, plan, Options(policy="fixed", max_batch_size=1)).run())
    # By regime: two calls to warm up and two an answer, in one pass and then in two; the last calls, those of
    # the block drafter, are not timed.
    assert len(reused) == (6 + 2) + (12 + 4) and sum(reused[:6] + reused[8:20]) == 0


def test_what_the_policy_goes_by_is_not_given_to_the_block_drafter():
    models = Models.load("tiny", "tiny-draft", dtype="float32")
    how = Options(cost_table=CostTable([(1, 0.01)]), budget_lag=1, max_batch_size=1)
    greedy = [SamplingParams(temperature=0.0)]
    evaluator = Evaluator(models, {"one": standard_library()[:1]}, greedy, Plan(tokens=8), how)
    [found] = evaluator.run()
    assert evaluator.info["budget_lag"] == 1 and found.measured["all"]["block"].every.answers == 1


def noted(tmp_path, texts, fitted_prompts, choosing_rounds=100):
    """Evaluates on these texts with a calibration fitted to those prompts: the regime."""
    draft, file = tmp_path / "draft", tmp_path / "some.jsonl"
    if not draft.exists():
        shutil.copytree(resolve("tiny-draft", "draft"), draft)
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    [first, *_] = read_calibrations(resolve("tiny-draft", "draft") / "calibration.json")
    first = replace(first, fitted_prompts=tuple(fitted_prompts), choosing_rounds=choosing_rounds)
    write_calibrations(draft / "calibration.json", [first])
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
    assert part["confidence_head_note"].endswith("2 of 4 prompts that calibration.json was not fitted to")
    # The very rounds of the others: raw and calibrated scores can be compared.
    alone = noted(tmp_path, texts[1::2], digests[::2])
    assert "on the 2 of 2 prompts that" in alone["confidence_head_note"]
    for scores in ("confidence_head", "confidence_head_calibrated"):
        assert part[scores] == alone[scores]
    older = noted(tmp_path, texts, digests[::2], choosing_rounds=None)
    assert "chosen by prompts that it does not name, which may be these" in older["confidence_head_note"]
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
    assert code == 0 and out.startswith("prompts: 3 of one, 3 of two\n")
    assert "acceptance length (pooled)" in out and "(mean of requests)" in out
    assert "coupled, temperature 0" in out and "confidence head" in out


@pytest.mark.parametrize("as_json", [True, False])
def test_a_page_that_cannot_be_written_takes_no_number_with_it(prompts, tmp_path, as_json):
    folder = tmp_path / "folder"
    folder.mkdir()

    class Gone(DSparkDecoder):
        """While it works, the folder goes."""

        def close(self):
            super().close()
            shutil.rmtree(folder, ignore_errors=True)

    how = ("--temperature", "0", "--html", folder / "report.html", *(["--json"] if as_json else []))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dspark.evaluate.run.DSparkDecoder", Gone)
        code, out, err = run("evaluate", *prompts, *QUICK, *how)
    assert code == 2 and "report.html cannot be written" in err
    if as_json:
        said, error = map(json.loads, out.splitlines())
        assert said["regimes"][0]["data_sets"]["all"]["draft"]["answers"] == 6 and "error" in error
    else:
        assert "acceptance length (pooled)" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--no-draft",), "nothing to evaluate"),
        (("--html", "/nowhere/report.html"), "name a file in an existing directory"),
        (("--prompts", "/nowhere.jsonl"), "/nowhere.jsonl cannot be read"),
        (("--tokens", "0"), "tokens must be at least 1"),
        (("--policy", "threshold"), "needs a confidence_threshold"),
    ],
)
def test_refused_before_the_work(flags, message):
    code, _, err = run("evaluate", *flags)
    assert code == 2 and message in err and "Traceback" not in err
