"""The command line, in this process: what is printed where, and exit codes."""

import io
import json
import signal
import subprocess
import sys

import pytest

from conftest import DATA, RNN_DRAFT
from dspark import __version__, errors
from dspark.cli import chat, demo, main, show
from dspark.pretrained import resolve

PROMPT = "import os\n"
GREEDY = ("--temperature", "0", "--device", "cpu", "--dtype", "float32")


@pytest.fixture
def run(capsys):
    """Runs `dspark` with these arguments: (exit code, standard output, standard error)."""

    def call(*arguments):
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return (code, *capsys.readouterr())

    return call


@pytest.fixture
def generate(run):
    """`dspark generate --json`: the object."""

    def call(*arguments):
        code, out, err = run("generate", *GREEDY, "--json", *arguments)
        assert code == 0 and err == "" and out.count("\n") == 1
        return json.loads(out)

    return call


@pytest.fixture(scope="module")
def talking_target(tmp_path_factory):
    """The embedded target with a chat template."""
    path = tmp_path_factory.mktemp("talking")
    for file in resolve("tiny", "target").iterdir():
        (path / file.name).symlink_to(file)
    (path / "chat_template.jinja").write_text(
        "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}# assistant:"
    )
    return path


def test_generate_prints_the_documented_object(generate):
    found = generate(PROMPT, "--target", "tiny", "--draft", "tiny-draft", "--max-tokens", 12, "--seed", 7)
    assert {"text", "token_ids", "prompt_token_ids", "finish_reason", "stop_reason", "seed"} < found.keys()
    assert found["finish_reason"] == "length" and found["stop_reason"] is None and found["seed"] == 7
    assert len(found["token_ids"]) == 12 and found["acceptance_length"] > 1
    assert {"prefill_s", "draft_s", "verify_s", "sample_s", "total_s"} <= found["timing"].keys()
    for round_ in found["rounds"]:
        assert round_.keys() == {"drafted", "verified", "accepted", "confidence"}
        assert round_["accepted"] <= round_["verified"] <= round_["drafted"] == len(round_["confidence"])
    assert isinstance(found["text"], str) and found["text"]


def test_generate_streams_the_text_and_sums_up_on_stderr(run, generate):
    code, out, err = run("generate", PROMPT, *GREEDY, "--max-tokens", 12)
    assert code == 0
    assert out == generate(PROMPT, "--max-tokens", 12)["text"] + "\n"
    last = err.splitlines()[-1]
    assert (
        last.startswith("dspark: 12 tokens in ")
        and "acceptance length" in last
        and "finish reason length" in last
    )


def test_no_draft_gives_the_same_text_and_no_acceptance_length(generate):
    with_draft = generate(PROMPT, "--max-tokens", 20)
    alone = generate(PROMPT, "--max-tokens", 20, "--no-draft", "--draft", "tiny-draft")
    assert alone["token_ids"] == with_draft["token_ids"]
    assert alone["acceptance_length"] is None and alone["speculation"] == "off: no draft"
    assert all(r["drafted"] == 0 for r in alone["rounds"])


def test_token_ids_in_place_of_a_prompt(generate):
    text = generate(PROMPT, "--max-tokens", 4)
    ids = ",".join(map(str, text["prompt_token_ids"]))
    assert generate("--token-ids", ids, "--max-tokens", 4)["token_ids"] == text["token_ids"]


def test_a_prompt_from_standard_input(generate, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    assert generate("-", "--max-tokens", 4)["token_ids"] == generate(PROMPT, "--max-tokens", 4)["token_ids"]


def test_sampling_flags_reach_the_request(generate):
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


def test_end_tokens_and_how_to_ignore_them(generate, tmp_path):
    """The token that the text has at place 3 is made the end token."""
    plain = generate(PROMPT, "--max-tokens", 8)["token_ids"]
    for file in resolve("tiny", "target").iterdir():
        if file.name != "generation_config.json":
            (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": plain[3]}))
    pair = ("--target", tmp_path, "--draft", "tiny-draft", "--max-tokens", 8)
    ended = generate(PROMPT, *pair)
    assert ended["token_ids"] == plain[: plain.index(plain[3]) + 1] and ended["finish_reason"] == "stop"
    assert generate(PROMPT, *pair, "--ignore-eos")["token_ids"] == plain
    held = generate(PROMPT, *pair, "--min-tokens", 6)["token_ids"]
    assert len(held) >= 6 and plain[3] not in held[:6]


def test_several_samples(run):
    flags = ("generate", PROMPT, "--temperature", "1", "--seed", "1", "--n", "3", "--max-tokens", "6")
    code, out, _ = run(*flags, "--json")
    samples = json.loads(out)
    assert code == 0 and len(samples) == 3 and len({tuple(s["token_ids"]) for s in samples}) > 1
    code, out, err = run(*flags)
    assert code == 0 and out == "".join(s["text"] + "\n" for s in samples)
    assert "sample 3 of 3" in err


@pytest.mark.parametrize("threshold", ["0.0", "0.5"])
@pytest.mark.parametrize("draft", ["draft-vanilla", "draft-rnn"])
def test_golden_traces(generate, draft, threshold):
    """Two prompts of the reference implementation's traces: the text, and what each round verified and committed."""
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


def test_decoder_flags_reach_the_decoder(generate):
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
def test_errors_are_one_line_and_code_2(run, arguments, kind, words):
    code, out, err = run(*arguments)
    assert code == 2 and out in ("", "\n")
    lines = [line for line in err.splitlines() if line not in ("dspark: starting torch", "dspark: loading")]
    assert len(lines) == 1 and lines[0].startswith(f"dspark: {kind}: ") and words in lines[0]
    assert issubclass(getattr(errors, kind), errors.DSparkError)
    code, out, err = run(*arguments[:1], "--json", *arguments[1:])
    assert code == 2 and err.count("\n") == 1
    error = json.loads(out)["error"]
    assert error["type"] == kind and words in error["message"]


def test_what_follows_two_dashes_is_no_flag(run):
    code, out, _ = run("generate", "--", "--json", "extra")
    assert code == 2 and out == ""


def test_a_fault_of_dspark_itself_is_one_line_too(run, monkeypatch):
    monkeypatch.setattr("dspark.cli.generate._prompt", lambda options: 1 / 0)
    code, out, err = run("generate", "x")
    assert code == 2 and out == "" and err.startswith("dspark: ZeroDivisionError: ") and err.count("\n") == 1
    monkeypatch.setenv("DSPARK_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        run("generate", "x")


def test_ctrl_c_is_130(run, monkeypatch):
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


def test_help_lists_what_there_is_and_loads_no_torch():
    code = "import sys; from dspark.cli import main\ntry: main(sys.argv[1:])\nfinally: print('torch' in sys.modules)"
    for arguments, words in (
        (["--help"], ["generate", "chat", "inspect", "audit"]),
        (["generate", "--help"], ["--confidence-threshold", "--markov-candidates"]),
        (["audit", "--help"], ["--prompts", "inconclusive"]),
        (["--version"], [f"dspark {__version__}"]),
        (["inspect", "tiny-draft", "--target", "tiny"], ["packaging: flat"]),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
        )
        assert done.stdout.endswith("False\n") and all(word in done.stdout for word in words)
    for absent in ("bench", "evaluate", "calibrate", "profile", "train", "export", "kernels", "serve"):
        assert (
            f" {absent} "
            not in subprocess.run(
                [sys.executable, "-m", "dspark.cli", "--help"], capture_output=True, text=True, check=True
            ).stdout
        )


def test_inspect(run):
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


def test_audit_passes_and_says_so(run):
    small = ("audit", "--tokens", 16, "--samples", 4)
    code, out, err = run(*small)
    assert code == 0 and out.endswith("\nPASS\n")
    for words in ("temperature 0: 128 tokens", "0 beyond", "drafted tokens accepted", "shown:", "not shown:"):
        assert words in out
    code, out, err = run(*small, "--json")
    assert code == 0 and err == "" and json.loads(out)["verdict"] == "pass"


def test_audit_without_a_draft_is_inconclusive(run, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "import os"}\n{"turns": ["def f(x):"]}\n')
    code, out, _ = run("audit", "--no-draft", "--prompts", prompts, "--tokens", 8, "--samples", 1)
    assert code == 3 and out.endswith("\nINCONCLUSIVE\n") and "2 prompts" in out
    assert "temperature 0: nothing was drafted" in out


def test_audit_failure_is_code_1(run, monkeypatch):
    monkeypatch.setattr("dspark.audit.run._faults", lambda *_: ["a planted fault"])
    code, out, _ = run("audit", "--tokens", 4, "--samples", 1)
    assert code == 1 and out.endswith("\nFAIL\n") and "  - a planted fault\n" in out


def test_generate_with_the_chat_template(generate, talking_target):
    pair = ("--target", talking_target, "--draft", "tiny-draft", "--max-tokens", 4)
    rendered = generate("# user: hello\n# assistant:", *pair)
    assert generate("hello", "--chat", *pair)["prompt_token_ids"] == rendered["prompt_token_ids"]


def test_chat_reads_lines_and_remembers(run, generate, talking_target, monkeypatch):
    pair = (*GREEDY, "--target", talking_target, "--draft", "tiny-draft", "--max-tokens", 6)
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\ntwo\n/exit\nthree\n"))
    code, out, err = run("chat", "--system", "be brief", "--json", *pair)
    first, second = map(json.loads, out.splitlines())
    assert code == 0 and err == ""
    expected = f"# system: be brief\n# user: one\n# assistant: {first['text']}\n# user: two\n# assistant:"
    assert second["prompt_token_ids"] == generate(expected, *pair)["prompt_token_ids"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo"))
    code, out, err = run("chat", "--system", "be brief", *pair)
    assert code == 0 and out == f"{first['text']}\n{second['text']}\n"
    assert sum("acceptance length" in line for line in err.splitlines()) == 2


class Typing:
    """Stands for a terminal at which these lines are typed; an exception among them is raised."""

    def __init__(self, *lines):
        self.lines = list(lines)

    def __call__(self, question):
        line = self.lines.pop(0) if self.lines else EOFError()
        if isinstance(line, BaseException):
            raise line
        return line


@pytest.fixture
def typed(monkeypatch):
    def type_(*lines):
        monkeypatch.setattr(sys, "stdin", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})())
        monkeypatch.setattr("builtins.input", Typing(*lines))

    return type_


def test_chat_at_a_terminal(run, talking_target, typed):
    pair = (*GREEDY, "--target", talking_target, "--draft", "tiny-draft", "--max-tokens", 4)
    typed("one", "two")
    code, out, err = run("chat", *pair)
    assert code == 0 and err.count("4 tokens in") == 2 and out.endswith("\n\n")  # Ctrl-D leaves the line
    typed("one", KeyboardInterrupt())
    assert run("chat", *pair)[0] == 130
    typed("/exit", AssertionError("read on after /exit"))
    assert run("chat", *pair)[0] == 0


def test_chat_goes_on_after_an_error_at_a_terminal(run, talking_target, typed):
    pair = (
        *GREEDY,
        "--target",
        talking_target,
        "--draft",
        "tiny-draft",
        "--max-tokens",
        4,
        "--max-model-len",
        40,
    )
    typed("import " * 40, "one")
    code, _, err = run("chat", *pair)
    assert code == 0 and "context window 40" in err and "4 tokens in" in err


def test_ctrl_c_cancels_an_answer_and_keeps_what_was_shown(run, talking_target, typed, monkeypatch):
    pair = (*GREEDY, "--target", talking_target, "--draft", "tiny-draft", "--max-tokens", 30)
    seen, plain = [], show.print_stream

    def interrupted(pieces, shown):
        def some():
            for number, piece in enumerate(pieces):
                yield piece
                if number == 1:
                    raise KeyboardInterrupt

        return plain(some() if not seen else pieces, shown)

    class Recording(chat._Conversation):
        def answer(self, message):
            try:
                super().answer(message)
            finally:
                seen.append(list(self._messages))

    monkeypatch.setattr(chat, "print_stream", interrupted)
    monkeypatch.setattr(chat, "_Conversation", Recording)
    typed("one", "two")
    code, out, err = run("chat", *pair)
    assert code == 0 and "dspark: cancelled" in err and "30 tokens in" in err
    kept = seen[0][1]["content"]
    assert kept and out.startswith(kept + "\n")
    assert [m["role"] for m in seen[1]] == ["user", "assistant", "user", "assistant"] and seen[1][1][
        "content"
    ] == kept


def test_demo_prints_a_text_and_a_table(capsys, monkeypatch):
    monkeypatch.setattr(demo, "RUNS", 1)
    assert demo.main(["--model", "tiny"]) == 0
    out = capsys.readouterr().out
    assert "float32 on cpu" in out and "def read_lines" in out
    row = next(line for line in out.splitlines() if line.startswith("temperature 0 "))
    assert row.endswith("yes") and float(row.split()[5]) > 1.5
    assert "target alone" in out and "medians of 1 runs of 256 tokens" in out


def test_infinities_become_null(capsys):
    show.print_json({"logprobs": [{"1": float("-inf"), "2": -0.5}], "more": (float("nan"), True)})
    assert json.loads(capsys.readouterr().out) == {"logprobs": [{"1": None, "2": -0.5}], "more": [None, True]}


def test_text_that_the_terminal_cannot_show(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    show.write_text("naïve")
    assert stream.buffer.getvalue() == b"na?ve"

