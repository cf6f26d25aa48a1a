"""`--template-option`: keywords for the target's chat template, on every command that renders chats."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from commandline import generate, link_target, run
from dspark.calibrate import run as calibration_run
from dspark.checkpoint.calibration import read_calibrations
from dspark.errors import RequestError
from dspark.pretrained import resolve
from dspark.text import Tokenizer

TEMPLATE = (
    "{% for m in messages %}# {{ m.content }}\n{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking is false %}# no thoughts\n{% endif %}{{ style }}"
)
"""As Qwen 3's asks."""
OFF = ("--template-option", "enable_thinking=false")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("thinking")
    link_target(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture
def pair(target: Path) -> tuple[Any, ...]:
    return ("--target", target, "--draft", "tiny-draft", "--device", "cpu")


def test_generate_and_chat_give_them_to_the_template(
    pair: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = (*pair, "--max-tokens", 2)
    style = ("--template-option", "style=# a=b: [1", "--template-option", "style=# brief")
    expected = generate("# hello\n# no thoughts\n# brief", *few)["prompt_token_ids"]
    assert generate("hello", "--chat", *OFF, *style, *few)["prompt_token_ids"] == expected
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    code, out, _ = run("chat", "--json", *OFF, *style, *few)
    assert code == 0 and json.loads(out)["prompt_token_ids"] == expected


def test_evaluate_and_calibrate_say_them(
    pair: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for bound in ("FEWEST", "FEWEST_TO_CHOOSE"):
        monkeypatch.setattr(calibration_run, bound, 0)
    prompts, draft, page = tmp_path / "some.jsonl", tmp_path / "draft", tmp_path / "page.html"
    prompts.write_text("".join(f'{{"prompt": "import {name}"}}\n' for name in ("os", "re", "sys", "json")))
    shutil.copytree(resolve("tiny-draft", "draft"), draft)
    (draft / "calibration.json").unlink()
    how = ("--prompts", prompts, "--tokens", 24, "--temperature", 0, "--json", *pair, "--draft", draft)
    code, out, err = run("calibrate", *OFF, *how)
    assert code == 0 and json.loads(out)["template_options"] == {"enable_thinking": False}, err
    [entry] = read_calibrations(draft / "calibration.json")
    assert entry.template_options == {"enable_thinking": False}
    # The same prompts with and without thoughts are different prompts.
    for options, held_out in ((OFF, "the 1 of 4 prompts"), ((), "the 4 of 4 prompts")):
        code, out, err = run("evaluate", *options, *how, "--html", page)
        assert code == 0, err
        said = json.loads(out)
        assert said["info"]["template_options"] == ({"enable_thinking": False} if options else None)
        assert held_out in said["regimes"][0]["confidence_head_note"]
        assert ("enable_thinking: False" in page.read_text()) == bool(options)


@pytest.mark.parametrize(
    ("command", "entry", "flags"),
    [
        ("audit", "dspark.audit.run.audit_pair", ("--chat", "--no-draft")),
        ("bench", "dspark.bench.run.Bench", ("--batches", 1)),
    ],
)
def test_audit_and_bench_ask_with_them(
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    entry: str,
    flags: tuple[Any, ...],
) -> None:
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text('{"prompt": "hello"}\n')
    asked: list[Any] = []

    def ends(*given: Any) -> None:
        asked.append(next(one for one in given[::-1] if isinstance(one, list | dict)))
        raise RequestError("that is enough")

    monkeypatch.setattr(entry, ends)
    pair = ("--target", target, "--draft", "tiny-draft", "--device", "cpu", "--prompts", prompts)
    code, _, err = run(command, *flags, *OFF, *pair)
    assert code == 2 and "that is enough" in err
    [tokens] = asked[0]["mine"] if command == "bench" else asked[0]
    assert list(tokens) == Tokenizer.from_directory(target).encode("# hello\n# no thoughts\n")


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        ("generate", ("x", "--template-option", "a=1"), "give --chat too"),
        ("generate", ("x", "--chat", "--template-option", "a"), "expected a keyword like"),
        ("chat", ("--template-option", "messages=[]"), "expected a keyword like"),
        ("evaluate", ("--template-option", "thinking=False"), "thinking=false, not False"),
        ("evaluate", OFF, "has no chat template to give enable_thinking to"),
        ("calibrate", (*OFF, "--output", "/tmp/x.json"), "has no chat template to give enable_thinking to"),
        ("bench", ("--target", "tiny", *OFF), "has no chat template to give enable_thinking to"),
        ("audit", OFF, "give --chat too"),
        ("audit", ("--chat", *OFF), "has no chat template to give enable_thinking to"),
    ],
)
def test_refused(command: str, flags: tuple[str, ...], message: str) -> None:
    code, _, err = run(command, *flags, "--device", "cpu")
    assert code == 2 and message in err and "Traceback" not in err
