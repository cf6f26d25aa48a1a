"""Golden texts on a device, and what a round costs there, with CUDA graphs off and on; one line of JSON.

    python benchmarks/gpu_rounds.py --device cuda

The loop does not capture graphs itself: what they could save is measured on the attention of a verify pass,
whose launches are captured once and replayed. Not yet run on a GPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dspark import DSparkDecoder, SamplingParams
from dspark.attention import CachedAttention, KVStore, attention_kernel
from dspark.kernels import choose

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "data" / "qwen3"
DRAFTS = {"draft-vanilla": "tiny-draft", "draft-rnn": GOLDEN / "draft-rnn"}
LAYERS, HEADS, KEY_HEADS, HEAD_DIM = 16, 32, 8, 128
ROWS, CONTEXT = 8, 4096


def main() -> None:
    """Prints what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    right, wrong = 0, []
    for name in DRAFTS:
        for difference in traces(name, options.device, most=None if on_gpu else 1):
            right += difference is None
            wrong += [difference] if difference else []
    for name in DRAFTS:
        difference = default_policy(name, options.device)
        right += difference is None
        wrong += [difference] if difference else []
    rounds = [loop(options.device, temperature) for temperature in (0.0, 0.7)]
    if on_gpu:
        timed_graphs, same = graphs()
        rounds += timed_graphs
        right += same
        wrong += [] if same else ["a CUDA graph's attention is not that of the launches, bit by bit"]
    said = f"{right} of {right + len(wrong)} golden texts" + (f"; {wrong[0]}" if wrong else "")
    print(json.dumps({"ok": right > 0 and not wrong, "said": said, "wrong": wrong, "rounds": rounds}))


def traces(name: str, device: str, most: int | None) -> list[str | None]:
    """For each golden run: None if text and rounds are the reference's, else the first difference."""
    found: list[str | None] = []
    rows = json.loads((GOLDEN / name / "golden" / "trace.json").read_text())[:most]
    for threshold in sorted({run["confidence_threshold"] for row in rows for run in row["runs"]}):
        with DSparkDecoder.from_pretrained(
            "tiny", DRAFTS[name], device=device, policy="threshold", confidence_threshold=threshold
        ) as decoder:
            for number, row in enumerate(rows):
                run = next(run for run in row["runs"] if run["confidence_threshold"] == threshold)
                params = SamplingParams(max_tokens=row["max_new_tokens"], temperature=0.0)
                result = decoder.generate(row["prompt_ids"], params)
                where = f"{name} {number} at {threshold}"
                found.append(first_difference(where, run, result))
    return found


def first_difference(where: str, run: dict[str, Any], result: Any) -> str | None:
    """The first token or round that differs from the reference's; the last rounds, which the limit cuts, are
    left out."""
    found, wanted = result.token_ids, run["output_ids"]
    for place, (ours, theirs) in enumerate(zip(found, wanted, strict=False)):
        if ours != theirs:
            return f"{where}: token {place} is {ours}, not {theirs}"
    whole = len(run["acceptance_lengths"]) - 8
    for place, round_ in enumerate(result.rounds[:whole]):
        expected = (run["acceptance_lengths"][place], run["proposal_lengths"][place])
        if (round_.committed, round_.verified) != expected:
            return f"{where}: round {place} is {(round_.committed, round_.verified)}, not {expected}"
    if len(found) != len(wanted):
        return f"{where}: {len(found)} tokens, not {len(wanted)}"
    return None


def default_policy(name: str, device: str) -> str | None:
    """None if a decoder with the default policy, which measures costs as it starts, gives the golden text."""
    row = json.loads((GOLDEN / name / "golden" / "trace.json").read_text())[0]
    with (
        tempfile.TemporaryDirectory() as cache,
        unittest.mock.patch.dict("os.environ", DSPARK_CACHE=cache),  # no table is kept there
        DSparkDecoder.from_pretrained("tiny", DRAFTS[name], device=device) as decoder,
    ):
        source = decoder.info()["cost_table"]
        params = SamplingParams(max_tokens=row["max_new_tokens"], temperature=0.0)
        found = list(decoder.generate(row["prompt_ids"], params).token_ids)
    if not source.startswith("measured at start"):
        return f"{name}: costs were not measured but {source}"
    same = found == row["runs"][0]["output_ids"]
    return None if same else f"{name}, default policy: {found}, not {row['runs'][0]['output_ids']}"


def loop(device: str, temperature: float, turns: int = 5) -> dict[str, Any]:
    """Microseconds of a round of the embedded pair, request by request, by the engine's own clock."""
    with DSparkDecoder.from_pretrained("tiny", "tiny-draft", device=device, policy="fixed") as decoder:
        params = SamplingParams(temperature=temperature, max_tokens=48, seed=1, ignore_eos=True)
        decoder.generate("import os\n", params)
        before = decoder.stats()
        for _ in range(turns if device == "cuda" else 1):
            decoder.generate("import os\n", params)
        after = decoder.stats()
    rounds = after["passes"] - before["passes"]
    each = round((after["round_s"] - before["round_s"]) / rounds * 1e6, 1)
    return {"what": f"round of the embedded pair, temperature {temperature}", "microseconds": each}


def graphs() -> tuple[list[dict[str, Any]], bool]:
    """Attention of a verify pass of one request, as launched and as a graph, and whether they agree."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    with torch.inference_mode():
        store = KVStore(LAYERS, KEY_HEADS, HEAD_DIM, dtype, device)
        store.reserve(CONTEXT + ROWS)
        store.data.normal_()
        store.length = CONTEXT
        heads = torch.randn(ROWS, HEADS + 2 * KEY_HEADS, HEAD_DIM, dtype=dtype, device=device)

        kernel = attention_kernel(choose(device), dtype, [HEAD_DIM])

        def make() -> CachedAttention:
            return CachedAttention([(store, ROWS)], HEADS, [None] * LAYERS, causal=True, kernel=kernel)

        attention = make()

        def pass_() -> torch.Tensor:
            return torch.stack([attention.layer(index, heads) for index in range(LAYERS)])

        expected = pass_()
        launched = timed(pass_)
        # Our kernels run on the stream that is torch's current one when a pass begins: the captured one.
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            attention = make()
            pass_()
            stream.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                found = pass_()
        replayed = timed(graph.replay)
    what = f"attention of {LAYERS} layers, {ROWS} rows over {CONTEXT} positions"
    rows = [
        {"what": f"{what}, launched", "microseconds": launched},
        {"what": f"{what}, as a CUDA graph", "microseconds": replayed},
    ]
    return rows, bool(torch.equal(found, expected))


def timed(action: Callable[[], object], turns: int = 50) -> float:
    """Microseconds of one call, the median of many."""
    seconds = []
    for turn in range(turns + 5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        action()
        torch.cuda.synchronize()
        if turn >= 5:
            seconds.append(time.perf_counter() - started)
    return round(sorted(seconds)[len(seconds) // 2] * 1e6, 1)


if __name__ == "__main__":
    main()
