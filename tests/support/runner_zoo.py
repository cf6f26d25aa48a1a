"""Small random pairs of every kind of cache, and texts decoded through the runner alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import adapter_zoo
import gemma4_zoo
import model_zoo
import random_pair
from dspark.draft import DSparkDraftModel, load_draft
from dspark.serve.runner import Runner
from dspark.target import Target, load_target
from hybrid_zoo import write_hybrid

KINDS = ("dense", "windows", "hybrid", "gemma4", "adapter")
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 5}
VOCAB = adapter_zoo.VOCAB
"""Token ids below this are in every vocabulary."""
EXACT = 1e-10


class Pair(NamedTuple):
    """A target and its draft, in float64."""

    target: Target
    draft: DSparkDraftModel

    def runner(self) -> Runner:
        """A runner without requests."""
        return Runner(self.target, self.draft)


def load_pair(kind: str, path: Path) -> Pair:
    """Writes and loads a random pair."""
    if kind == "gemma4":
        target = gemma4_zoo.write_target(path / "target")
        draft = gemma4_zoo.write_draft(path / "draft")
    elif kind == "adapter":
        target = adapter_zoo.write(path / "target", "mistral-window")
        draft = random_pair.write_draft(path / "draft", VOCAB, block_size=5)
    else:
        if kind == "hybrid":
            target = write_hybrid(path / "target", vocab_size=model_zoo.VOCAB)
        else:
            changes = WINDOWS if kind == "windows" else {}
            target = model_zoo.write_target(path / "target", "qwen3", **changes)
        config = model_zoo.nested_config()
        draft = model_zoo.write_checkpoint(path / "draft", config, model_zoo.draft_tensors(own=False))
    model = load_target(target, dtype=torch.float64)
    return Pair(model, load_draft(draft, target=model, dtype=torch.float64))


def tokens(count: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def prefill(runner: Runner, request: int, prompt: Sequence[int], parts: int | Sequence[int] = 512) -> None:
    """Runs a prompt in parts of this size, or of these sizes."""
    ids = list(prompt)
    sizes = list(parts) if isinstance(parts, Sequence) else [parts] * (-(-len(ids) // parts))
    with torch.inference_mode():
        for size in sizes:
            runner.prefill([request], [ids[:size]], [runner.draft_model is not None])
            ids = ids[size:]
    assert not ids


class Round(NamedTuple):
    """What a round of one request saw, and how many drafted tokens it would keep at temperature 0."""

    base: Tensor
    logits: Tensor
    accepted: int


@torch.inference_mode()
def decode(runner: Runner, request: int, anchor: int, rounds: int) -> tuple[list[Round], list[int]]:
    """Rounds that draft the best base logits; also the tokens, the anchor among them.

    Random drafts are rarely right, so what is kept is prescribed, from one drafted token to all of them; how
    many the target would have kept is reported.
    """
    seen, text = [], [anchor]
    for number in range(rounds):
        base, _ = runner.draft([request], text[-1:])
        drafted = [token % VOCAB for token in base.argmax(-1).tolist()]
        logits = runner.verify([request], [text[-1], *drafted], [1 + len(drafted)])
        best = [token % VOCAB for token in logits.argmax(-1).tolist()]
        agreed = [x == y for x, y in zip(drafted, best, strict=False)]
        kept = (2 * number + 1) % (len(drafted) + 1)
        runner.commit([request], [1 + kept])
        text += [*drafted[:kept], best[kept]]
        seen.append(Round(base, logits, [*agreed, False].index(False)))
    return seen, text


@torch.inference_mode()
def plain(runner: Runner, request: int, text: Sequence[int]) -> None:
    """Rounds without a draft that commit this text."""
    for token in text:
        runner.verify([request], [token], [1])
        runner.commit([request], [1])


def assert_same(found: Sequence[Round], expected: Sequence[Round]) -> None:
    """Logits of draft and target agree to rounding, and as much is accepted."""
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine.base - theirs.base).abs().max() < EXACT
        assert (mine.logits - theirs.logits).abs().max() < EXACT
        assert mine.accepted == theirs.accepted
