"""`dspark bench`: its statistics, its prompts, and small runs of it."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commandline import run, talking_target
from dspark.bench.cells import Cell, Grid, predicted_seconds
from dspark.bench.clients import Usage, keep_busy
from dspark.bench.plot import plot_bench
from dspark.bench.prompt_sets import check_room
from dspark.bench.ratios import ratio_over_best
from dspark.bench.report import HEADER, CellReport, footnote, report_cell, rows
from dspark.bench.run import Bench, ModeRuns, prompt_of, timed_prompts
from dspark.cli import main
from dspark.cli.show import table
from dspark.core import CostTable
from dspark.decoder import DSparkDecoder
from dspark.durations import duration
from dspark.errors import CapacityError, ConfigError, NumericsError
from dspark.prompts import SETS, built_in
from dspark.sampling import SamplingParams
from dspark.text import Tokenizer

TINY = ("bench", "--target", "tiny", "--device", "cpu", "--tokens", 8, "--turns", 2, "--batches", 2)


def test_the_ratio_is_over_the_better_of_the_others() -> None:
    mine = [1.0, 2.0, 4.0, 1.0, 2.0]
    plain, fixed = [s / 1.1 for s in mine], [s / 1.5 for s in mine]
    found = ratio_over_best(mine, {"fixed": fixed, "plain": plain})
    assert found.over == "plain"
    assert (found.median, found.low, found.high) == pytest.approx((1.1, 1.1, 1.1))
    assert ratio_over_best(mine, {"fixed": fixed}).median == pytest.approx(1.5)


def test_a_slow_turn_hits_all_modes_and_not_the_ratio() -> None:
    mine, plain = [1.2, 1.2, 0.06, 1.2, 1.2], [1.0, 1.0, 0.05, 1.0, 1.0]
    found = ratio_over_best(mine, {"plain": plain})
    assert (found.low, found.high) == pytest.approx((1.2, 1.2))


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    """Lognormal noise around a ratio of 1.1: intervals from 9 turns cover it about 95 times in 100."""
    generator, covered = np.random.default_rng(7), 0
    for trial in range(200):
        mine = 1.1 * np.exp(0.1 * generator.standard_normal(9))
        plain = np.exp(0.1 * generator.standard_normal(9))
        found = ratio_over_best(list(mine), {"plain": list(plain)}, resamples=400, seed=trial)
        assert found.low is not None and found.high is not None
        covered += found.low <= 1.1 <= found.high
    assert 180 <= covered <= 199


def test_the_bootstrap_is_seeded() -> None:
    speeds = [float(s) for s in np.random.default_rng(1).random(9) + 1]
    others = {"plain": speeds[::-1]}
    assert ratio_over_best(speeds, others) == ratio_over_best(speeds, others)
    found = ratio_over_best(speeds, others)
    assert found.low is not None and found.high is not None and found.low < found.high


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_few_turns_have_no_interval_and_no_mark_of_one(turns: int) -> None:
    modes = {"plain": runs([1.0] * turns), "throughput": runs([0.97] * turns)}
    report = report_cell(Cell("chat", 0.0, 4), modes)
    found = report.to_json()["throughput_over_best"]
    interval = (found["low"], found["high"])
    assert found["median"] == pytest.approx(0.97)
    if turns < 3:
        assert interval == (None, None) and report.marks == () and rows(report)[1][-2] == "-"
    else:
        assert interval == pytest.approx((0.97, 0.97)) and report.marks == ("interval below 1",)


@pytest.mark.parametrize("others", [{}, {"plain": [1.0]}])
def test_a_turn_that_is_missing_is_an_error(others: dict[str, list[float]]) -> None:
    with pytest.raises(ValueError, match="each turn"):
        ratio_over_best([1.0, 2.0], others)


def runs(speeds: list[float]) -> ModeRuns:
    return ModeRuns(speeds, [1.0] * len(speeds), rounds=10, committed=20, verified=30, answers=4, looping=1)


@pytest.mark.parametrize(
    ("mine", "marks"),
    [
        ([1.0, 1.0, 1.0], ()),
        ([0.97, 0.97, 0.97], ("interval below 1",)),
        ([1.1, 0.8, 0.8], ("median below 0.95",)),
        ([0.8, 0.8, 0.8], ("interval below 1", "median below 0.95")),
    ],
)
def test_what_falls_short_is_marked(mine: list[float], marks: tuple[str, ...]) -> None:
    modes = {"plain": runs([1.0] * 3), "fixed": runs([0.5] * 3), "throughput": runs(mine)}
    report = report_cell(Cell("chat", 0.0, 4), modes)
    assert report.marks == marks
    shown = report.to_json()
    assert shown["throughput_over_best"]["over"] == "plain"
    assert shown["throughput_over_fixed"]["median"] == pytest.approx(2 * sorted(mine)[1])
    assert shown["modes"]["plain"]["acceptance_length"] is None
    assert shown["modes"]["fixed"]["acceptance_length"] == 2.0
    assert shown["modes"]["fixed"]["verify_budget"] == 3.0
    assert shown["modes"]["fixed"]["looping_share"] == 0.25
    assert shown["modes"]["plain"]["tokens_per_second"] == 1.0


def test_the_prompts_of_the_package_are_many_and_different() -> None:
    everything = [text for name in SETS for text in built_in(name)]
    assert all(len(built_in(name)) >= 32 for name in SETS)
    assert len(set(everything)) == len(everything)


def test_the_estimate_counts_every_mode_and_turn() -> None:
    table, cell = CostTable([(1, 0.01), (8, 0.02), (64, 0.1)]), Cell("chat", 0.0, 8)
    few = Grid(sets=["chat"], policies=["throughput"], turns=3, tokens=64)
    many = Grid(sets=["chat"], turns=6, tokens=64)
    assert predicted_seconds(few, cell, table, 7) == pytest.approx(
        (1 + 3 * 1.125) * 2 * 64 * 0.02 + 2 * 3 * 0.06
    )
    with_prompts = predicted_seconds(few, cell, table, 7, prompt=50) - predicted_seconds(few, cell, table, 7)
    assert with_prompts == pytest.approx(4 * 7 * 8 * 50 * table.seconds(128) / 128)
    assert predicted_seconds(many, cell, table, 7) > 2 * predicted_seconds(few, cell, table, 7)
    assert [duration(s) for s in (12.4, 200, 7200)] == ["12 s", "3 min 20 s", "2 h 00 min"]


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("batches of a benchmark must have at least one entry", {"batches": []}),
        ("batches of a benchmark must be at least 1, not 0", {"batches": [1, 0]}),
        ("turns of a benchmark must be at least 1", {"turns": 0}),
        ("at least 2 tokens", {"tokens": 1}),
        ("not 'plain'", {"policies": ["plain"]}),
        ("threshold must be between 0 and 1, not nan", {"threshold": float("nan")}),
    ],
)
def test_a_grid_that_cannot_be_measured(message: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=message):
        Grid(sets=["chat"], **options)


def test_a_small_run_in_json(tmp_path: Path) -> None:
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [f"import {name}\n", "more"]}) + "\n" for name in "abc"))
    plot = tmp_path / "speeds.svg"
    arguments = ("--temperatures", 0, "--prompts", prompts, "--plot", plot, "--json")
    code, out, err = run(*TINY, *arguments)
    assert code == 0 and err.startswith("dspark: 1 cells, about "), err
    shown = json.loads(out)
    assert shown["tokens"] == 8 and shown["turns"] == 2 and shown["took_s"] > 0 and shown["estimated_s"] > 0
    assert shown["cells_that_repeat_prompts"] == 1  # two turns of two requests, three prompts
    [cell] = shown["cells"]
    assert (cell["set"], cell["temperature"], cell["batch"]) == ("mine", 0.0, 2)
    assert list(cell["modes"]) == ["plain", "fixed", "threshold", "throughput"]
    for mode, measured in cell["modes"].items():
        assert len(measured["speeds"]) == 2 and all(speed > 0 for speed in measured["speeds"])
        assert measured["tokens_per_second"] > 0 and measured["tokens_per_second_per_user"] > 0
        assert (measured["acceptance_length"] is None) == (mode == "plain")
    assert cell["modes"]["fixed"]["verify_budget"] > cell["modes"]["threshold"]["verify_budget"] >= 0
    ratio = cell["throughput_over_best"]
    assert ratio["median"] > 0 and ratio["low"] is ratio["high"] is None  # of two turns
    assert b"<svg" in plot.read_bytes()


def test_a_small_run_as_a_table() -> None:
    code, out, _ = run(*TINY, "--temperatures", 0.7, "--policies", "throughput", "--sets", "python")
    assert code == 0
    lines = out.splitlines()
    head, plain, row = lines[[line.startswith("set ") for line in lines].index(True) :][:3]
    assert head.split()[:5] == ["set", "T", "batch", "mode", "tok/s"]
    assert plain.split()[:4] == ["python", "0.7", "2", "plain"] and "-  " in plain
    assert row.split()[0] == "throughput" and "(plain)" in row and row.startswith("      ")
    assert lines[-1].startswith("1 cells in ")


def slow_cell() -> tuple[CellReport, Grid]:
    """A cell in which throughput is slower than plain and faster than fixed."""
    modes = {
        mode: ModeRuns([speed] * 3, [speed / 32] * 3, 10, committed, verified, 4, 1)
        for mode, speed, committed, verified in (
            ("plain", 1000.0, 10, 0),
            ("fixed", 500.0, 25, 70),
            ("threshold", 700.0, 22, 40),
            ("throughput", 800.0, 15, 12),
        )
    }
    return report_cell(Cell("python", 0.7, 32), modes), Grid(
        sets=["python"], temperatures=[0.7], batches=[32], turns=3
    )


def test_every_mode_has_its_row() -> None:
    report, _ = slow_cell()
    lines = table([HEADER, *rows(report)]).splitlines()
    assert max(map(len, lines)) <= 120
    assert [line.split()[:5] for line in lines[2:4]] == [
        ["fixed", "500.0", "15.6", "2.50", "7.00"],
        ["threshold", "700.0", "21.9", "2.20", "4.00"],
    ]
    assert lines[1].split() == ["python", "0.7", "32", "plain", "1000.0", "31.2", "-", "-", "25%"]
    assert lines[4].split()[:6] == ["throughput", "800.0", "25.0", "1.50", "1.20", "25%"]
    assert "0.80 (plain) *" in lines[4] and lines[4].endswith("1.60")
    assert footnote(report) == "* python, T 0.7, batch 32: interval below 1, median below 0.95"


def test_the_plot_shows_every_measure_of_every_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    figures: list[Any] = []
    monkeypatch.setattr("dspark.bench.plot.save_plot", lambda figure, path: figures.append(figure))
    report, grid = slow_cell()
    plot_bench([report], grid, tmp_path / "bench.png", "a title")
    shown = {
        axes.get_ylabel(): {line.get_label(): line.get_ydata()[0] for line in axes.lines}
        for axes in figures[0].axes
    }
    assert shown["tokens per second"] == {
        "plain": 1000.0,
        "fixed": 500.0,
        "threshold": 700.0,
        "throughput": 800.0,
    }
    assert shown["tokens/s per user"]["throughput"] == 25.0
    assert shown["acceptance length"]["fixed"] == 2.5 and np.isnan(shown["acceptance length"]["plain"])
    assert shown["verify budget"]["threshold"] == 4.0


def test_names_in_plots_are_no_formulas(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report, grid = slow_cell()
    odd = dataclasses.replace(grid, sets=["x$^$y"])
    cell = dataclasses.replace(report.cell, prompts="x$^$y")
    plot_bench([dataclasses.replace(report, cell=cell)], odd, tmp_path / "bench.svg", "cost_$5_$10")
    assert (tmp_path / "bench.svg").stat().st_size > 1000


def test_a_plot_that_fails_takes_no_number_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ConfigError("no room for a plot")

    monkeypatch.setattr("dspark.bench.plot.plot_bench", fails)
    code, out, err = run(*TINY, "--temperatures", 0, "--plot", tmp_path / "p.svg", "--json")
    assert code == 2 and "no room for a plot" in err
    assert json.loads(out.splitlines()[0])["cells"]


def test_prompts_need_room_for_what_is_measured() -> None:
    check_room({"mine": [[1] * 8]}, 16, 8)
    with pytest.raises(
        CapacityError, match="set mine, prompt 2 has 9 tokens, which leaves no room for 8 more"
    ):
        check_room({"mine": [[1], [1] * 9]}, 16, 8)
    code, _, err = run(*TINY, "--max-model-len", 12, "--json")
    assert code == 2 and "in the context window of 12" in err, err


def test_what_is_timed_was_not_warmed_up_with(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[int, list[tuple[int, ...]]] = {4: [], 16: []}
    with DSparkDecoder.from_pretrained("tiny", "tiny-draft", device="cpu", max_batch_size=2) as decoder:
        submission = decoder._submission

        def see(prompt: Any, params: Any, called: float) -> Any:
            asked[params.max_tokens].append(tuple(prompt))
            return submission(prompt, params, called)

        monkeypatch.setattr(decoder, "_submission", see)
        prompts = [[i + 1] for i in range(240)]
        grid = Grid(sets=["x"], temperatures=[0.0], batches=[2], policies=["fixed"], turns=3, tokens=16)
        monkeypatch.setattr(Grid, "warm_tokens", 4)
        [_] = Bench(decoder, grid, {"x": prompts}).run(lambda *_: None)
    # The cell's first run, which is not timed, has the later prompts too. How many follow those that a run
    # begins with depends on the clock.
    warm, timed = set(asked[4]), {prompt for prompt in asked[16] if prompt <= (120,)}
    assert {(i,) for i in (1, 2, 5, 6, 9, 10)} <= timed and asked[16][:2] == [(121,), (122,)]
    assert {(120 + i,) for i in (1, 2, 5, 6, 9, 10)} <= warm and min(warm) > (120,)


def test_no_client_is_without_a_request() -> None:
    """Each round that counts has every client in it, and the tokens counted are those of the rounds."""
    with DSparkDecoder.from_pretrained("tiny", "tiny-draft", device="cpu", policy="fixed") as decoder:
        asked = 0

        def requests() -> Iterator[tuple[list[int], SamplingParams]]:
            nonlocal asked
            while True:
                asked += 1
                yield [asked], SamplingParams(max_tokens=3 + asked % 5, temperature=0.0, ignore_eos=True)

        before = Usage.of(decoder)
        results = keep_busy(decoder, requests(), clients=4, tokens=60)
        time.sleep(0.05)
        after = Usage.of(decoder)
        stats = decoder.stats()
    assert len(results) == asked > 10 and after.seconds > before.seconds
    assert after.tokens - before.tokens == sum(r.committed for result in results for r in result.rounds) >= 60
    # Who runs at the end is cut off, not always the youngest.
    ends = [result.finish_reason for result in results]
    assert set(ends) <= {"length", "abort"} and ends.count("abort") <= 4
    assert stats["running"] == stats["queued"] == 0 and stats["finished"] == asked


def test_the_rounds_of_others_leave_throughputs_costs_alone() -> None:
    dear = CostTable([(1, 1.0)])  # any round is cheaper
    with DSparkDecoder.from_pretrained("tiny", "tiny-draft", device="cpu", cost_table=dear) as decoder:
        core, prompt = decoder._engine.core, [1, 2, 3]
        bench = Bench(decoder, Grid(sets=["x"], temperatures=[0.0], batches=[1]), {"x": [prompt]})
        cell = Cell("x", 0.0, 1)
        seen = {}
        for mode in ("fixed", "plain", "throughput"):
            bench._switch(mode)
            bench._ask(cell, mode, 0, 40 if mode != "throughput" else 4)
            table = core.cost_table()
            assert table is not None
            seen[mode] = table.seconds(1)
    assert seen["plain"] < 0.9 and seen["throughput"] == 1.0


class Cut:
    """Stands in for `Bench._cell`: the second cell ends in an error."""

    def __init__(self, error: BaseException) -> None:
        self.error, self.cells = error, 0

    def __call__(self, cell: Cell) -> dict[str, ModeRuns]:
        self.cells += 1
        if self.cells == 2:
            raise self.error
        return {mode: runs([1.0]) for mode in ("plain", "throughput")}


CUT = (*TINY, "--temperatures", 0, 0.7, "--policies", "throughput", "--turns", 1)


@pytest.mark.parametrize(
    ("error", "code", "name"),
    [
        (KeyboardInterrupt(), 130, "KeyboardInterrupt"),
        (NumericsError("no number"), 2, "NumericsError"),
        (ZeroDivisionError("by nothing"), 2, "ZeroDivisionError"),
    ],
)
def test_what_was_measured_is_shown_whatever_ends_it(
    error: BaseException, code: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bench, "_cell", Cut(error))
    found, out, err = run(*CUT, "--json")
    shown = json.loads(out)
    assert found == code and shown["error"]["type"] == name and len(shown["cells"]) == 1
    assert code == 130 or f"dspark: {name}: {error}" in err
    monkeypatch.setattr(Bench, "_cell", Cut(error))
    found, out, err = run(*CUT)
    assert found == code and out.count("python  0  ") == 1 and "1 cells in " in out
    assert code == 130 or f"dspark: {name}: {error}" in err


def test_users_prompts_are_questions_whatever_their_file_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[int]] = []

    def see(bench: Bench, cell: Cell) -> dict[str, ModeRuns]:
        asked.extend(map(list, bench._prompts[cell.prompts]))
        return {mode: runs([1.0]) for mode in ("plain", "throughput")}

    monkeypatch.setattr(Bench, "_cell", see)
    target = tmp_path / "target"
    target.mkdir()
    prompts = tmp_path / "python.jsonl"
    prompts.write_text('{"prompt": "What is a list?"}\n')
    arguments = ("--target", talking_target(target), "--draft", "tiny-draft", "--prompts", prompts)
    code, _, err = run(*CUT, *arguments)
    assert code == 0, err
    tokenizer = Tokenizer.from_directory(target)
    assert asked[0] == tokenizer.render_chat([{"role": "user", "content": "What is a list?"}])


def test_help_names_the_target_that_goes_without_saying(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    assert "smollm2 if it has been fetched" in " ".join(capsys.readouterr().out.split())


ERRORS = [
    (("--no-draft",), "ConfigError", "give --draft DIR"),
    (("--policies", "brave"), "ConfigError", "not 'brave'"),
    (("--batches", 0), "ConfigError", "batches of a benchmark must be at least 1"),
    (("--plot", "speeds.pdf"), "ConfigError", "ends in .png or .svg"),
    (("--plot", "no/where.png"), "ConfigError", "name a file in an existing directory"),
    (("--plot", "/proc/plot.png"), "ConfigError", "/proc/plot.png cannot be written"),
    (("--prompts", "nowhere.jsonl"), "RequestError", "nowhere.jsonl cannot be read"),
    (("--sets", "chess"), "ConfigError", "chess"),
    (("--confidence-threshold", 1.5), "ConfigError", "threshold must be between 0 and 1, not 1.5"),
]


@pytest.mark.parametrize(("arguments", "kind", "message"), ERRORS, ids=lambda value: str(value)[:30])
def test_errors(arguments: tuple[Any, ...], kind: str, message: str) -> None:
    code, out, err = run("bench", "--target", "tiny", *arguments, "--json")
    assert code == 2 and json.loads(out)["error"]["type"] == kind and message in err


def test_a_bad_line_of_prompts_is_named(tmp_path: Path) -> None:
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text('{"turns": ["fine"]}\n{"turns": []}\n')
    code, _, err = run("bench", "--target", "tiny", "--prompts", prompts)
    assert code == 2 and f"{prompts}, line 2" in err and '"turns"' in err


def test_every_prompt_has_its_turn() -> None:
    for prompts in (5, 6, 10):
        laps = [[prompt_of(lap * prompts + i, prompts) for i in range(prompts)] for lap in range(3)]
        assert all(sorted(lap) == list(range(prompts)) for lap in laps)
    # Timed requests take every second number: of an even number of prompts it would be half of them.
    one = Cell(prompts="chat", temperature=0.0, batch=1)
    assert {prompt_of(2 * turn, 10) for turn in range(10)} == set(range(10))
    assert timed_prompts(one, turns=9, prompts=10) == 9
    assert timed_prompts(one, turns=12, prompts=10) == 10
    assert timed_prompts(dataclasses.replace(one, batch=4), turns=3, prompts=6) < 12
