"""`dspark chat`, at a terminal and in a pipe."""

import io
import json
import sys

import pytest

from commandline import GREEDY, generate, run, talking_target
from dspark.cli import chat, show


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return talking_target(tmp_path_factory.mktemp("talking"))


def test_generate_with_the_chat_template(target):
    pair = ("--target", target, "--draft", "tiny-draft", "--max-tokens", 4)
    rendered = generate("# user: hello\n# assistant:", *pair)
    assert generate("hello", "--chat", *pair)["prompt_token_ids"] == rendered["prompt_token_ids"]


def test_chat_reads_lines_and_remembers(target, monkeypatch):
    pair = (*GREEDY, "--target", target, "--draft", "tiny-draft", "--max-tokens", 6)
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


class Terminal(io.StringIO):
    """Stands for a terminal that is written to, or read from."""

    def isatty(self):
        return True


class Typing:
    """Stands for a terminal at which these lines are typed; an exception among them is raised."""

    def __init__(self, *lines):
        self.lines = list(lines)

    def __call__(self, question=""):
        sys.stdout.write(question)
        line = self.lines.pop(0) if self.lines else EOFError()
        if isinstance(line, BaseException):
            raise line
        return line


@pytest.fixture
def typed(monkeypatch):
    def type_(*lines):
        monkeypatch.setattr(sys, "stdin", Terminal())
        monkeypatch.setattr("builtins.input", Typing(*lines))

    return type_


def test_chat_at_a_terminal(target, typed, monkeypatch):
    monkeypatch.setattr(io, "StringIO", Terminal)  # for the outputs, too
    pair = (*GREEDY, "--target", target, "--draft", "tiny-draft", "--max-tokens", 4)
    typed("one", "two")
    code, out, err = run("chat", *pair)
    assert code == 0 and err.count("4 tokens in") == 2
    assert out.startswith("> ") and out.endswith("\n> \n") and out.count("> ") == 3  # Ctrl-D leaves the line
    typed("one", KeyboardInterrupt())
    assert run("chat", *pair)[0] == 130
    typed("/exit", AssertionError("read on after /exit"))
    assert run("chat", *pair)[0] == 0


def test_whoever_reads_the_answers_reads_no_prompts(target, typed, monkeypatch):
    pair = (*GREEDY, "--target", target, "--draft", "tiny-draft", "--max-tokens", 4)
    typed("one", "two")
    code, out, err = run("chat", "--json", *pair)
    first, second = map(json.loads, out.splitlines())
    assert code == 0 and err == "> > > \n"
    typed("one", "two")
    code, out, err = run("chat", *pair)
    assert code == 0 and out == f"{first['text']}\n{second['text']}\n" and err.count("> ") == 3
    monkeypatch.setattr(io, "StringIO", Terminal)  # objects are kept apart at a terminal, too
    typed("one")
    code, out, err = run("chat", "--json", *pair)
    assert code == 0 and json.loads(out)["text"] == first["text"]
    assert err.endswith("\r> > \n")  # behind the line of the loading, which is gone


def test_lines_that_are_no_text(target, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8"))
    code, out, err = run("chat", *GREEDY, "--target", target, "--draft", "tiny-draft")
    assert code == 2 and out == "" and err.count("\n") == 1
    assert err.startswith("dspark: RequestError: standard input is not utf-8 text: ")


def test_chat_goes_on_after_an_error_at_a_terminal(target, typed):
    pair = (
        *GREEDY,
        "--target",
        target,
        "--draft",
        "tiny-draft",
        "--max-tokens",
        4,
        "--max-model-len",
        40,
    )
    typed("import " * 40, "one")
    code, _, err = run("chat", *pair)
    assert code == 0 and "context window holds 40" in err and "4 tokens in" in err


def test_ctrl_c_cancels_an_answer_and_keeps_what_was_shown(target, typed, monkeypatch):
    pair = (*GREEDY, "--target", target, "--draft", "tiny-draft", "--max-tokens", 30)
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
