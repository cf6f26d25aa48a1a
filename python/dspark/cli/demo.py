"""The main job of `make demo`: text decoded speculatively, then what the draft was worth.

Both sides run on the same engine and the same weights; they are warmed up and take turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dspark.cli.main import guarded
from dspark.cli.show import Progress, print_stream, say, summary, table, write_text
from dspark.errors import CheckpointError
from dspark.pretrained import resolve
from dspark.result import GenerationResult, pooled_acceptance_length
from dspark.sampling import SamplingParams

if TYPE_CHECKING:
    from dspark.decoder import DSparkDecoder
    from dspark.serve.models import Models

RUNS = 3
TEMPERATURES = (0.0, 0.7)


@dataclass(frozen=True, slots=True)
class Pair:
    """A pair, and what the demo does with it."""

    target: str
    draft: str
    about: str
    prompt: str
    is_chat: bool
    max_tokens: int
    block_size: int
    """Tokens drafted per round: fewer than the checkpoint's if later ones are hardly ever kept."""


PAIRS = {
    "tiny": Pair(
        "tiny",
        "tiny-draft",
        "the embedded pair: 0.7 million parameters, trained on Python source text",
        'def read_lines(path, encoding="utf-8"):\n    """Return the lines of a file."""\n',
        False,
        256,
        4,
    ),
    "smollm2": Pair(
        "smollm2",
        "smollm2-draft",
        "SmolLM2-135M-Instruct, dequantised from Q4_1 (not the original), and a draft of 16 M parameters",
        "Explain in a few sentences why the sky is blue.",
        True,
        96,
        3,
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo; `--model tiny`, `smollm2` or `auto`."""
    parser = argparse.ArgumentParser(prog="dspark-demo", description=__doc__)
    parser.add_argument(
        "--model",
        choices=["auto", *sorted(PAIRS)],
        default="auto",
        help="which pair; auto (the default): smollm2, or tiny where it cannot be fetched",
    )
    options = parser.parse_args(argv)
    return guarded(lambda: show(_available() if options.model == "auto" else PAIRS[options.model]))


def _available() -> Pair:
    """The larger pair if it is here or can be fetched, else the embedded one."""
    pair = PAIRS["smollm2"]
    try:
        resolve(pair.draft, "draft")
        resolve(pair.target, "target")
    except CheckpointError as error:
        say(f"{error}; continuing with the embedded pair")
        return PAIRS["tiny"]
    return pair


def show(pair: Pair) -> int:
    """Streams a text, then compares."""
    progress = Progress()
    progress("starting torch", 0, 1)
    from dspark.decoder import DSparkDecoder
    from dspark.serve.models import Models
    from dspark.serve.options import Options

    def load() -> Models:
        return Models.load(pair.target, pair.draft, progress=progress.loading)

    # Every round drafts, so that the table shows what the draft is worth.
    how = Options(policy="fixed", block_size=pair.block_size)
    with DSparkDecoder(load, how) as decoder:
        progress.clear()
        prompt = decoder.models.require_tokenizer().encode_prompt(pair.prompt)
        info = decoder.info()
        print(
            f"{pair.about}\ntarget in {info['dtype']}, draft in {info['draft_dtype']}, on {info['device']}, "
            f"{info['threads']} threads; {info['block_size']} drafted tokens per round\n"
        )
        write_text(pair.prompt + ("\n\n" if pair.is_chat else ""))
        print(f"[{summary(print_stream(decoder.stream(prompt, _params(pair, TEMPERATURES[-1]))))}]\n")
        rows: list[tuple[str, ...]] = [
            ("", "with the draft", "target alone", "gain", "acceptance length", "same text")
        ]
        for temperature in TEMPERATURES:
            progress(f"timing at temperature {temperature:g}", 0, 1)
            rows.append(_compare(decoder, prompt, pair, temperature))
        progress.clear()
    print(table(rows))
    print(f"\ntokens per second, medians of {RUNS} runs of {pair.max_tokens} tokens that took turns")
    return 0


def _compare(decoder: DSparkDecoder, prompt: list[int], pair: Pair, temperature: float) -> tuple[str, ...]:
    """One row of the table."""
    runs: dict[bool, list[GenerationResult]] = {True: [], False: []}
    for number in range(RUNS + 1):  # the first is the warm-up
        for speculative, results in runs.items():
            params = replace(_params(pair, temperature, seed=number), speculative=speculative)
            results.append(decoder.generate(prompt, params))
    fast, plain = (
        statistics.median(len(r.token_ids) / r.timing.total_s for r in results[1:])
        for results in runs.values()
    )
    same = "in distribution" if temperature else _same_text(decoder.models, runs[True][0], runs[False][0])
    length = pooled_acceptance_length(runs[True][1:])
    shown = "-" if length is None else f"{length:.2f}"
    return (
        f"temperature {temperature:g}",
        f"{fast:.1f}",
        f"{plain:.1f}",
        f"{fast / plain:.2f}x",
        shown,
        same,
    )


def _same_text(models: Models, one: GenerationResult, other: GenerationResult) -> str:
    """Whether two greedy texts are the same; else where they first differ, and by how little."""
    for position, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=False)):
        if a != b:
            from dspark.audit.reference import Reference

            reference = Reference(models.target)
            row = reference.next_row([*one.prompt_token_ids, *one.token_ids[:position]])
            gap = float(abs(row[a] - row[b]))
            cause = "rounding" if gap <= reference.bound(row) else "NOT rounding"
            return f"up to token {position}, logits {gap:.1g} apart: {cause}"
    return "yes" if len(one.token_ids) == len(other.token_ids) else "no: one ends earlier"


def _params(pair: Pair, temperature: float, seed: int = 0) -> SamplingParams:
    return SamplingParams(max_tokens=pair.max_tokens, temperature=temperature, seed=seed)


if __name__ == "__main__":
    sys.exit(main())
