"""`dspark profile`: what it prints, draws and keeps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commandline import run
from dspark import DSparkDecoder
from dspark.plots import check_plot
from dspark.serve.costs import AT_START

SMALL = ("profile", "--target", "tiny", "--device", "cpu", "--max-batch-size", "2")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("dspark.serve.costs.THOROUGH", replace(AT_START, repeats=AT_START.repeats + 1))
    return tmp_path / "cache" / "costs"


def test_json_and_what_is_kept(cache: Path) -> None:
    code, out, err = run(*SMALL, "--json")
    assert code == 0 and err == ""
    shown = json.loads(out)
    assert shown.keys() == {
        *("target", "draft", "dtype", "draft_dtype", "threads", "torch", "device", "passes", "draft_passes"),
        *("chain_seconds_per_token", "context", "measured_s", "kept", "file"),
    }
    assert [entry["tokens"] for entry in shown["passes"] if entry["requests"] == 1] == [1, 2, 4, 8, 16]
    for entry in shown["passes"]:
        assert entry["tokens_per_second"] == pytest.approx(entry["tokens"] / entry["seconds"])
    assert [entry["requests"] for entry in shown["draft_passes"]] == [1, 2]
    assert shown["kept"] is False and Path(shown["file"]).parent == cache

    again = json.loads(run(*SMALL, "--json")[1])
    assert again == {**shown, "kept": True}
    fresh = json.loads(run(*SMALL, "--json", "--refresh")[1])
    assert fresh["kept"] is False and fresh["file"] == shown["file"]
    with DSparkDecoder.from_pretrained("tiny", "tiny-draft", device="cpu", max_batch_size=2) as decoder:
        assert decoder.info()["cost_table"] == f"from cache {shown['file']}"


def test_what_a_start_measured_in_a_hurry_is_measured_again() -> None:
    with DSparkDecoder.from_pretrained("tiny", "tiny-draft", device="cpu", max_batch_size=2) as decoder:
        assert decoder.info()["cost_table"].startswith("measured")
    assert json.loads(run(*SMALL, "--json")[1])["kept"] is False


def test_a_table_and_a_picture(tmp_path: Path) -> None:
    for name, magic in (("costs.png", b"\x89PNG"), ("costs.svg", b"<?xml")):
        code, out, err = run(*SMALL, "--plot", tmp_path / name)
        assert code == 0 and (tmp_path / name).read_bytes().startswith(magic)
    lines = out.splitlines()
    assert any(line.split() == ["target", "pass", "requests", "ms", "tokens/s"] for line in lines)
    assert any(line.startswith("16 tokens") for line in lines)
    assert any(line.startswith("draft pass and context") for line in lines)
    assert err.startswith("dspark: kept from an earlier run; ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--no-draft",), "nothing to profile"),
        (("--plot", "costs.pdf"), "ends in .png or .svg, not costs.pdf"),
        (("--block-size", "20"), "20"),
        (("--max-batch-size", "0"), "max_batch_size must be"),
    ],
)
def test_errors(arguments: tuple[str, ...], message: str) -> None:
    code, out, err = run("profile", "--target", "tiny", *arguments, "--json")
    assert code == 2 and json.loads(out)["error"]["type"] == "ConfigError" and message in err


def test_plots_name_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark.plots.find_spec", lambda name: None)
    code, _, err = run("profile", "--target", "tiny", "--plot", "costs.png")
    assert code == 2 and "pip install matplotlib" in err
    check_plot(None)


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "file"))
    code, _, err = run(*SMALL)
    assert code == 0 and "the cache cannot be written" in err
    shown: dict[str, Any] = json.loads(run(*SMALL, "--json")[1])
    assert shown["file"] is None
