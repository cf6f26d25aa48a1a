"""The command line when something goes wrong: exit codes, and what is said."""

import io
import json
import signal
import subprocess
import sys

import pytest

from commandline import GREEDY, PROMPT, run
from dspark import errors
from dspark.cli import show


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        (["generate"], "RequestError", "either PROMPT or --token-ids"),
        (["generate", "x", "--token-ids", "1"], "RequestError", "either PROMPT or --token-ids"),
        (["generate", ""], "RequestError", "the prompt is empty"),
        (["generate", "--token-ids", ""], "RequestError", "the prompt is empty"),
        (["generate", "--token-ids", "1,x"], "ConfigError", "expected token ids like 1,2,3"),
        (["generate", "--token-ids", "5,512"], "RequestError", "512"),
        (["generate", "--token-ids", "1", "--chat"], "RequestError", "--chat"),
        (["generate", "x", "--chat"], "RequestError", "chat template"),
        (["generate", "x", "--max-model-len", "8", "--token-ids"], "ConfigError", "expected one argument"),
        (["generate", "import os\n" * 9, "--max-model-len", "8"], "CapacityError", "context window 8"),
        (["generate", "x", "--top-p", "2"], "RequestError", "top_p"),
        (["generate", "x", "--top-p", "two"], "ConfigError", "invalid float value"),
        (["generate", "x", "--temperature", "-1"], "RequestError", "temperature"),
        (["generate", "x", "--temp", "1"], "ConfigError", "unrecognized arguments: --temp"),
        (["generate", "x", "--target", "nowhere"], "ConfigError", "no draft is known"),
        (["generate", "x", "--target", "nowhere", "--no-draft"], "CheckpointError", "'nowhere'"),
        (["generate", "x", "--draft", "tiny"], "CheckpointError", "'tiny' is a target"),
        (["generate", "x", "--dtype", "int4"], "ConfigError", "int4"),
        (["generate", "x", "--policy", "brave"], "ConfigError", "brave"),
        (["generate", "x", "--policy", "throughput"], "ConfigError", "cost table"),
        (["generate", "x", "--policy", "threshold"], "ConfigError", "confidence_threshold"),
        (["generate", "x", "--confidence-threshold", "0.5"], "ConfigError", "threshold"),
        (["generate", "x", "--block-size", "20"], "ConfigError", "20"),
        (["generate", "x", "--acceptance", "lenient"], "ConfigError", "lenient"),
        (["inspect", "nowhere"], "CheckpointError", "nowhere"),
        (["inspect"], "ConfigError", "PATH"),
        (["audit", "--tokens", "0"], "RequestError", "tokens"),
        (["audit", "--prompts", "nowhere.jsonl"], "RequestError", "nowhere.jsonl"),
        (["serve"], "ConfigError", "invalid choice: 'serve'"),
        ([], "ConfigError", "COMMAND"),
    ],
)
def test_errors_are_one_line_and_code_2(arguments, kind, words):
    code, out, err = run(*arguments)
    assert code == 2 and out == "" and err.count("\n") == 1
    assert err.startswith(f"dspark: {kind}: ") and words in err
    assert issubclass(getattr(errors, kind), errors.DSparkError)
    code, out, err = run(*arguments[:1], "--json", *arguments[1:])
    assert code == 2 and err.count("\n") == 1
    error = json.loads(out)["error"]
    assert error["type"] == kind and words in error["message"]


def test_what_follows_two_dashes_is_no_flag():
    code, out, _ = run("generate", "--", "--json", "extra")
    assert code == 2 and out == ""


def test_a_fault_of_dspark_itself_is_one_line_too(monkeypatch):
    monkeypatch.setattr("dspark.cli.generate._prompt", lambda options: 1 / 0)
    code, out, err = run("generate", "x")
    assert code == 2 and out == "" and err.startswith("dspark: ZeroDivisionError: ") and err.count("\n") == 1
    monkeypatch.setenv("DSPARK_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        run("generate", "x")


def test_ctrl_c_is_130(monkeypatch):
    def interrupt(options):
        raise KeyboardInterrupt

    monkeypatch.setattr("dspark.cli.generate._prompt", interrupt)
    assert run("generate", "x") == (130, "", "")


def begin_long_text():
    """`dspark generate` in a process of its own, once its text has begun."""
    command = [sys.executable, "-u", "-m", "dspark.cli", "generate", PROMPT, *GREEDY, "--ignore-eos"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.read(10)
    return process


def test_ctrl_c_in_the_middle_of_a_text():
    with begin_long_text() as process:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and b"Traceback" not in err


def test_a_reader_that_goes_away():
    with begin_long_text() as process:
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait(timeout=30) == 141 and b"Traceback" not in err and b"rror" not in err


def test_text_that_the_terminal_cannot_show(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    show.write_text("naïve")
    assert stream.buffer.getvalue() == b"na?ve"
