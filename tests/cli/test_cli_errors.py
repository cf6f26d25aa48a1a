"""The command line when something goes wrong: exit codes, and what is said."""

import io
import json
import signal
import subprocess
import sys

import pytest

from commandline import GREEDY, PROMPT, STEPS, run
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
        (["generate", "x", "--chat"], "RequestError", "--target smollm2"),
        (["generate", "x", "--max-model-len", "8", "--token-ids"], "ConfigError", "expected one argument"),
        (["generate", "import os\n" * 9, "--max-model-len", "8"], "CapacityError", "context window holds 8"),
        (["generate", "x", "--top-p", "2"], "RequestError", "top_p"),
        (["generate", "x", "--top-p", "two"], "ConfigError", "invalid float value"),
        (["generate", "x", "--temperature", "-1"], "RequestError", "temperature"),
        (["generate", "x", "--temp", "1"], "ConfigError", "unrecognized arguments: --temp"),
        (["generate", "x", "--target", "/nowhere"], "CheckpointError", "there is no directory '/nowhere'"),
        (["generate", "x", "--target", "."], "ConfigError", "no draft is known for the target '.': give"),
        (
            ["generate", "x", "--target", "no/where"],
            "ConfigError",
            "which is not a directory here: give --draft",
        ),
        (["generate", "x", "--target", "nowhere", "--no-draft"], "CheckpointError", "'nowhere'"),
        (["generate", "x", "--draft", "tiny"], "CheckpointError", "'tiny' is a target"),
        (["generate", "x", "--dtype", "int4"], "ConfigError", "int4"),
        (["generate", "x", "--policy", "brave"], "ConfigError", "brave"),
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


def test_a_prompt_that_is_no_text(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xff"), encoding="utf-8"))
    code, out, err = run("generate", "-")
    assert code == 2 and out == "" and err.count("\n") == 1 and "unexpected" not in err
    assert err.startswith("dspark: RequestError: standard input is not utf-8 text: ") and "0xff" in err


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


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_the_middle_of_a_text(number, code):
    with begin_long_text() as process:
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
    assert process.returncode == code and b"Traceback" not in err


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


def test_chat_needs_a_template(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    code, out, err = run("chat")
    assert code == 2 and out == "" and "no chat template" in err and "--target smollm2" in err


def shell(words):
    """A shell command in which `$D` is `dspark`: its output, its error lines without progress."""
    script = words.replace("$D", f"{sys.executable} -m dspark.cli")
    done = subprocess.run(["/bin/bash", "-c", script], capture_output=True, text=True, timeout=120)
    return done.stdout, [line for line in done.stderr.splitlines() if line not in STEPS]


@pytest.mark.parametrize("arguments", ["generate x --max-tokens 3", "inspect tiny", "--help"])
@pytest.mark.parametrize("json", ["", "--json"])
def test_a_full_output_is_one_line_and_code_2(arguments, json):
    out, err = shell(f"$D {arguments} {json} >/dev/full; echo $?")
    assert out == "2\n"
    assert err == ["dspark: DSparkError: standard output cannot be written: No space left on device"]


def test_an_error_that_a_full_output_does_not_take():
    out, err = shell("$D generate --json >/dev/full; echo $?")
    assert out == "2\n" and len(err) == 1 and "either PROMPT or --token-ids" in err[0]


def test_an_error_that_nobody_reads():
    # The reader is gone before dspark begins.
    out, err = shell("(sleep 0.5; $D generate --json; echo $? >&2) | true")
    assert out == "" and err[-1] == "141" and not any("Traceback" in line for line in err)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("$D generate - <&-", "standard input is closed"),
        ("$D chat <&-", "standard input is closed"),
        ("$D generate x --max-tokens 3 --json >&-", "standard output is closed"),
    ],
)
def test_a_closed_stream_is_one_line_and_code_2(command, words):
    out, err = shell(f"({command}); echo $?")
    assert out == "2\n" and len(err) == 1 and err[0].startswith("dspark: ConfigError: ") and words in err[0]


@pytest.mark.parametrize("nowhere", ["2>&-", "2>/dev/full"])
def test_remarks_that_go_nowhere_stop_nothing(nowhere):
    out, err = shell(f"$D generate --token-ids 1 {' '.join(GREEDY)} --max-tokens 0 --json {nowhere}; echo $?")
    result, code = out.splitlines()
    assert code == "0" and json.loads(result)["token_ids"] == [] and err == []
    assert shell(f"$D generate {nowhere}; echo $?") == ("2\n", [])
