"""`dspark calibrate` on the embedded pair, its file, and who heeds it."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace

import pytest

from commandline import run
from dspark import CheckpointError, ConfigError, DSparkDecoder, RequestError, SamplingParams
from dspark.calibrate import run as calibration_run
from dspark.calibrate.prompts import calibration_sets, data_sets, digest, standard_library
from dspark.calibrate.rollout import BATCH, Plan, roll_out, whole_blocks
from dspark.checkpoint.calibration import Entry, Regime, read_calibrations, write_calibrations
from dspark.core import Calibration, CostTable
from dspark.draft.export import export_draft
from dspark.draft.packaging import read_draft_directory
from dspark.pretrained import resolve
from dspark.prompts import read_prompts
from dspark.serve.calibration import draft_calibrations, in_force
from dspark.serve.models import Models
from dspark.serve.options import Options

TABLE = CostTable([(1, 0.01)])
QUICK = ("--tokens", "32", "--samples", "1", "--device", "cpu")


def entry(temperatures=(2.0,) * 7, **regime):
    regime = {"acceptance": "rejection", "temperature": 0.0} | regime
    return Entry(
        regime=Regime(**regime),
        block_size=len(temperatures),
        temperatures=tuple(temperatures),
        rounds=100,
        ece_before=0.1,
        ece_after=0.01,
        target="tiny",
        date="2026-01-01",
        dspark="0",
    )


@pytest.fixture
def draft(tmp_path):
    directory = tmp_path / "draft"
    directory.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(resolve("tiny-draft", "draft") / name, directory)
    return directory


@pytest.fixture
def few(monkeypatch):
    """As few rounds as a quick test has are enough."""
    monkeypatch.setattr(calibration_run, "FEWEST", 0)
    monkeypatch.setattr(calibration_run, "FEWEST_TO_CHOOSE", 0)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("prompts") / "some.jsonl"
    file.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in standard_library()[:24]))
    return file


def test_writes_the_file_beside_the_draft_and_keeps_what_is_there(draft, few, prompts):
    other = entry(acceptance="coupled", temperature=1.0)
    write_calibrations(draft / "calibration.json", [other, entry()])
    plot = draft / "plot.svg"
    code, out, err = run(
        "calibrate", "--draft", draft, "--prompts", prompts, "--plot", plot, *QUICK, "--json"
    )
    assert (code, err) == (0, "")
    said = json.loads(out)
    assert said["output"] == str(draft / "calibration.json")
    written = read_calibrations(draft / "calibration.json")
    assert [str(e.regime) for e in written] == [
        "coupled, temperature 1",
        "rejection, temperature 0",
        "rejection, temperature 0.7",
    ]
    assert written[0] == other and written[1].rounds != 100
    for stored, shown in zip(written[1:], said["regimes"], strict=True):
        assert list(stored.temperatures) == shown["temperatures"] and stored.block_size == 7
        assert stored.target == "tiny" and stored.ece_after == round(shown["after"]["overall"]["ece"], 5)
        assert list(stored.acceptance_by_position) == shown["acceptance_by_position"]
        assert 0.0 < stored.acceptance_by_position[0] < 1.0
        assert stored.rounds == shown["rounds"] > 0 and shown["held_out_rounds"] > 0
        assert stored.choosing_rounds == shown["choosing_rounds"] > 0
        assert len(shown["before"]["survival"]) == len(shown["after"]["confidence"]) == 7
    assert plot.read_text().lstrip().startswith("<?xml")
    assert [p.name for p in draft.iterdir() if "calibration" in p.name] == ["calibration.json"]


def test_the_engine_starts_from_the_acceptance_that_was_found(models):
    known = replace(entry(), acceptance_by_position=(0.5, 0.25))
    [(regime, found)] = in_force(Options(), replace(models, calibrations=(known,))).calibrations
    assert regime == (0.0, 0, 1.0, 0.0) and found.acceptance == [0.5, 0.25]
    # Files of before have none.
    [(_, found)] = in_force(Options(), replace(models, calibrations=(entry(),))).calibrations
    assert found.acceptance == []


def test_the_file_says_what_it_was_fitted_to(draft, few, prompts, models):
    twice = ("--prompts", prompts, "--prompts", prompts, "--temperature", "0")
    code, _, err = run("calibrate", "--draft", draft, *twice, *QUICK)
    assert code == 0, err
    [written] = read_calibrations(draft / "calibration.json")
    texts = read_prompts(prompts)
    assert written.fitted_prompts == tuple(
        digest(models.tokens(text)) for place, text in enumerate(texts) if place % 4 != 3
    )


def test_files_of_before_load(tmp_path):
    file = tmp_path / "calibration.json"
    new = ("fitted_prompts", "choosing_rounds", "acceptance_by_position", "template_options")
    gone = dict.fromkeys(new, "gone")
    file.write_text(json.dumps(broken(**gone)))
    assert read_calibrations(file) == [entry()]


def test_prints_a_table(draft, few, prompts):
    code, out, _ = run("calibrate", "--draft", draft, "--prompts", prompts, "--temperature", "0", *QUICK)
    assert code == 0 and "rejection, temperature 0: fitted to" in out
    assert "AUROC" in out and f"written: {draft / 'calibration.json'}" in out


def test_two_prompts_are_fitted_to_and_none_is_scored_on(draft, few, tmp_path):
    two = tmp_path / "two.jsonl"
    two.write_text('{"prompt": "import os\\n"}\n{"prompt": "def read(self):\\n"}\n')
    plot = tmp_path / "plot.svg"
    how = ("--prompts", two, "--plot", plot, "--temperature", "0", *QUICK)
    code, out, err = run("calibrate", "--draft", draft, *how)
    assert code == 0 and "none left to score on" in out and plot.exists(), err
    [written] = read_calibrations(draft / "calibration.json")
    assert written.ece_before is written.ece_after is None and len(written.fitted_prompts) == 2


def test_rollouts_see_the_heads_own_confidences(models):
    """A second calibration must not be fitted on top of the first, whatever the policy goes by."""
    models = replace(models, calibrations=(entry(),))
    found = in_force(whole_blocks(Options(cost_table=TABLE, budget_lag=2), 7), models)
    assert [(key, c.temperatures) for key, c in found.calibrations] == [(None, [1.0] * 7)]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "name a file with --output"),
        (("--no-draft",), "nothing to calibrate"),
        (("--output", "/nowhere/at/all.json"), "name a file in an existing directory"),
        (("--output", "x.json", "--temperature", "-1"), "temperature must be"),
        (("--output", "x.json", "--samples", "0"), "samples must be at least 1"),
        (("--output", "x.json", "--prompts", "no.jsonl"), "no.jsonl cannot be read"),
    ],
)
def test_refused_before_the_work(flags, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = run("calibrate", *flags)
    assert code == 2 and message in err and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_too_few_rounds_are_refused_and_nothing_is_written(draft, prompts, monkeypatch):
    monkeypatch.setattr(calibration_run, "FEWEST", 10**6)
    code, _, err = run("calibrate", "--draft", draft, "--prompts", prompts, "--temperature", "0", *QUICK)
    assert code == 2 and "1000000 and 20 are needed; give more prompts or --tokens" in err
    assert not (draft / "calibration.json").exists()


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize("failing", [0.0, 0.7])
def test_a_regime_that_fails_takes_no_other_with_it(failing, as_json, draft, few, prompts, monkeypatch):
    fit = calibration_run.fit_regime

    def fit_or_fail(regime, rounds):
        if regime.temperature == failing:
            raise RequestError("too few")
        return fit(regime, rounds)

    monkeypatch.setattr(calibration_run, "fit_regime", fit_or_fail)
    plot = draft / "plot.svg"
    how = ("--prompts", prompts, "--plot", plot, *QUICK, *(["--json"] if as_json else []))
    code, out, err = run("calibrate", "--draft", draft, *how)
    assert code == 2 and "dspark: RequestError: too few" in err and plot.exists()
    if as_json:
        said = json.loads(out)
        assert [one["temperature"] for one in said["regimes"]] == [0.7 - failing]
        assert said["error"] == {"type": "RequestError", "message": "too few"}
    else:
        assert "written: " in out
    [written] = read_calibrations(draft / "calibration.json")
    assert written.regime.temperature == 0.7 - failing


@pytest.mark.parametrize("as_json", [True, False])
def test_what_was_fitted_is_shown_when_it_is_interrupted(as_json, draft, few, prompts, monkeypatch):
    fit = calibration_run.fit_regime

    def fit_or_stop(regime, rounds):
        if regime.temperature:
            raise KeyboardInterrupt
        return fit(regime, rounds)

    monkeypatch.setattr(calibration_run, "fit_regime", fit_or_stop)
    how = ("--prompts", prompts, *QUICK, *(["--json"] if as_json else []))
    code, out, _ = run("calibrate", "--draft", draft, *how)
    assert code == 130 and ("written: " in out or json.loads(out)["error"]["message"] == "interrupted")
    assert len(read_calibrations(draft / "calibration.json")) == 1


def test_a_short_block_is_calibrated_with_the_whole_one(draft, few, prompts):
    arguments = ("--prompts", prompts, "--temperature", "0", "--block-size", "3", *QUICK)
    code, _, err = run("calibrate", "--draft", draft, *arguments)
    assert code == 0, err
    [written] = read_calibrations(draft / "calibration.json")
    assert written.block_size == 7
    with DSparkDecoder.from_pretrained("tiny", draft, block_size=3, cost_table=TABLE) as decoder:
        assert decoder.info()["calibration"]["source"] == "calibration.json"


def test_a_failed_answer_ends_the_rollout_at_once(models):
    parts = []
    prompts = [[models.target.config.vocab_size]] + [[1]] * 2 * BATCH
    params = SamplingParams(temperature=0.0)
    with (
        DSparkDecoder(lambda: models, whole_blocks(Options(), 7)) as decoder,
        pytest.raises(RequestError, match="outside of the ids"),
    ):
        roll_out(decoder, prompts, params, Plan(tokens=2), lambda done, _: parts.append(done))
    assert parts == [0]


def broken(**changes):
    values = entry().to_json() | changes
    return {"version": 1, "entries": [{k: v for k, v in values.items() if v != "gone"}]}


BROKEN = [
    ([], "expected a JSON object"),
    ({"entries": []}, "version must be 1, found None"),
    ({"version": 1}, "entries must be a list of objects, found None"),
    ({"version": 1, "entries": [3]}, r"entries\[0\] must be an object, found 3"),
    (broken(acceptance="typical"), r"entries\[0\].acceptance must be one of .*, found 'typical'"),
    (broken(temperature="gone"), r"entries\[0\].temperature must be a number of at least 0, found None"),
    (broken(temperature=float("nan")), "temperature must be .* found nan"),
    (broken(top_p=1.5), "top_p must be a number from 0 to 1, found 1.5"),
    (broken(top_k=-1), "top_k must be a whole number of at least 0, found -1"),
    (broken(markov_candidates=0), "markov_candidates must be a positive integer, found 0"),
    (broken(block_size="gone"), r"entries\[0\].block_size is missing"),
    (
        broken(temperatures=[1.0] * 6),
        "temperatures must be a list of block_size = 7 numbers, .*a list of 6",
    ),
    (
        broken(temperatures=[1.0] * 8),
        "temperatures must be a list of block_size = 7 numbers, .*a list of 8",
    ),
    (broken(temperatures=[1.0] * 6 + [0]), "temperatures must be a list of numbers above 0"),
    (broken(temperatures=[10**400] * 7), "temperatures must be a list of numbers above 0"),
    (broken(acceptance_by_position=[0.5] * 8), "acceptance_by_position must be a list of at most 7 numbers"),
    (broken(acceptance_by_position=[1.5]), "acceptance_by_position must be a list of numbers from 0 to 1"),
    (
        broken(choosing_rounds=-1),
        r"entries\[0\].choosing_rounds must be a whole number of at least 0, found -1",
    ),
    (broken(fitted_prompts=[7]), r"entries\[0\].fitted_prompts must be a list of texts, found \[7\]"),
    (broken(template_options=[7]), r"entries\[0\].template_options must be an object, found"),
    (broken(temperatures=[1.0] * 6, block_size=6), r"block_size must be 7, .* found 6"),
    (broken(temperatures=[1.0] * 8, block_size=8), r"block_size must be 7, .* found 8"),
    ({"version": 1, "entries": [entry().to_json()] * 2}, r"entries\[0\] and entries\[1\] are both for"),
]


@pytest.mark.parametrize(("content", "message"), BROKEN, ids=lambda value: str(value)[:60])
def test_a_damaged_file_is_refused(content, message, tmp_path):
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps(content))
    config, _ = read_draft_directory(resolve("tiny-draft", "draft"))
    with pytest.raises(CheckpointError, match=message) as error:
        draft_calibrations(file, config, None)
    assert str(file) in str(error.value)


def test_a_damaged_file_is_refused_whatever_the_policy(draft):
    (draft / "calibration.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"calibration.json: cannot be read as JSON"):
        DSparkDecoder.from_pretrained("tiny", draft)


def test_a_draft_that_is_served_wider_has_entries_of_its_own(tmp_path):
    file = tmp_path / "calibration.json"
    write_calibrations(file, [entry(), entry([1.0] * 9)])
    config, _ = read_draft_directory(resolve("tiny-draft", "draft"))
    wide = replace(config, training_block_size=16)
    assert len(draft_calibrations(file, wide, None)) == 2
    assert len(draft_calibrations(file, replace(wide, block_size=9), 9)) == 2


def test_an_unwritable_place_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"gone/calibration.json cannot be written"):
        write_calibrations(tmp_path / "gone" / "calibration.json", [entry()])


def confidences(decoder):
    with decoder:
        return (
            decoder.generate("import os\n", SamplingParams(temperature=0.0, max_tokens=24))
            .rounds[0]
            .confidence
        )


def halved_logit(c):
    return 1 / (1 + math.exp(-math.log(c / (1 - c)) / 2))


def test_throughput_heeds_the_file_and_the_others_the_head(draft, tmp_path):
    raw = confidences(DSparkDecoder.from_pretrained("tiny", draft, policy="fixed"))
    write_calibrations(draft / "calibration.json", [entry()])
    assert confidences(DSparkDecoder.from_pretrained("tiny", draft, policy="fixed")) == raw
    cut = DSparkDecoder.from_pretrained("tiny", draft, policy="threshold", confidence_threshold=0.0)
    assert 'none: policy "threshold"' in cut.info()["calibration"]
    assert confidences(cut) == raw
    decoder = DSparkDecoder.from_pretrained("tiny", draft, policy="throughput", cost_table=TABLE)
    assert decoder.info()["calibration"] == {
        "source": "calibration.json",
        "regimes": ["rejection, temperature 0"],
    }
    halved = pytest.approx([halved_logit(c) for c in raw], abs=1e-5)
    assert confidences(decoder) == halved
    named = tmp_path / "named.json"
    write_calibrations(named, [entry()])
    assert (
        confidences(DSparkDecoder.from_pretrained("tiny", draft, policy="fixed", calibration=named)) == halved
    )
    own = Calibration([1.0] * 7, 7)
    over = DSparkDecoder.from_pretrained(
        "tiny", draft, policy="throughput", cost_table=TABLE, calibration=own
    )
    assert over.info()["calibration"]["source"] == "the caller"
    assert confidences(over) == pytest.approx(raw, abs=1e-6)


@pytest.fixture(scope="module")
def models():
    return Models.load("tiny", "tiny-draft", dtype="float32")


def chosen(models, entries, **options):
    models = replace(models, calibrations=tuple(entries))
    return in_force(Options(policy="throughput", cost_table=TABLE, **options), models)


def test_the_entries_that_fit_are_chosen(models):
    entries = [
        entry(temperature=0.7, top_p=0.9),
        entry(temperature=0.7, min_p=0.1),
        entry(temperature=0.7),
        entry(acceptance="coupled", temperature=0.7),
        entry(markov_candidates=64),
        entry(),
    ]
    found = chosen(models, entries)
    plain, min_p, top_p = "rejection, temperature 0.7", ", min_p 0.1", ", top_p 0.9"
    assert found.info()["regimes"] == [
        "rejection, temperature 0",
        plain,
        plain + min_p,
        plain + top_p,
    ]
    assert [regime for regime, _ in found.calibrations] == [
        (0.0, 0, 1.0, 0.0),
        (0.7, 0, 1.0, 0.0),
        (0.7, 0, 1.0, 0.1),
        (0.7, 0, 0.9, 0.0),
    ]
    assert chosen(models, entries, acceptance="coupled").info()["regimes"] == ["coupled, temperature 0.7"]
    few = chosen(models, entries, markov_candidates=64)
    assert few.info()["regimes"] == ["rejection, temperature 0, markov_candidates 64"]
    nothing = chosen(models, entries, acceptance="block")
    assert nothing.calibrations == [] and "none for acceptance block" in nothing.info()
    usual = replace(models, generation_config={"top_p": 0.9, "temperature": 0.7})
    assert chosen(usual, entries).info()["regimes"][1] == "rejection, temperature 0.7, top_p 0.9"


def test_a_named_file_has_to_have_what_is_needed(draft, tmp_path):
    named = tmp_path / "named.json"
    with pytest.raises(ConfigError, match="there is no file"):
        DSparkDecoder.from_pretrained("tiny", draft, policy="fixed", calibration=named)
    write_calibrations(named, [entry(acceptance="coupled")])
    with pytest.raises(ConfigError, match="has no calibration for acceptance rejection"):
        DSparkDecoder.from_pretrained("tiny", draft, policy="fixed", calibration=named)


def test_export_carries_it_along(draft, tmp_path):
    write_calibrations(draft / "calibration.json", [entry()])
    export_draft(draft, tmp_path / "out", "nested")
    assert read_calibrations(tmp_path / "out" / "calibration.json") == [entry()]


def test_prompts_by_data_set(prompts, tmp_path):
    assert list(data_sets([prompts], "tiny")) == ["some"]
    assert list(data_sets([], "tiny")) == ["python"]
    assert list(data_sets([], "smollm2")) == ["chat", "maths", "code"]
    assert len(calibration_sets([], "tiny")["library"]) > 50
    assert calibration_sets([prompts], "tiny") == data_sets([prompts], "tiny")
    twin = tmp_path / "some.jsonl"
    twin.write_text('{"prompt": "a"}\n')
    assert data_sets([prompts, twin], "tiny")[str(twin)] == ["a"]
