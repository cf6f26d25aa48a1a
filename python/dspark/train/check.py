"""The gates before a long run: do training and decoding compute the same?

Home-made drafts mostly stay weak for one of a few silent reasons: states from before the final norm, labels
or positions off by one, rotary settings that differ from the serving code, or future states in the context.
Each of these breaks one of the first two equalities, or what a draft learns by heart does not help decoding:

teacher       the argmax of the states that training reads is what the target decodes at temperature 0
acceptance    the tokens that a round of real decoding accepted are those that the training pass agrees with
overfit       a draft trained on one answer drafts that answer, block by block
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dspark.decoder import DSparkDecoder
from dspark.devices import parse_device, parse_dtype
from dspark.errors import ConfigError
from dspark.pretrained import resolve
from dspark.result import GenerationResult
from dspark.sampling import SamplingParams
from dspark.target import load_target
from dspark.target.load import read_target_config
from dspark.text.looping import FEWEST_DISTINCT, distinct_share
from dspark.train.batch import Anchors, Batch
from dspark.train.create import draft_from
from dspark.train.data.conversations import Conversation
from dspark.train.examples import collate
from dspark.train.forward import BlockOutputs, TrainingPass
from dspark.train.gather import directories, gather, tokenizer_of
from dspark.train.loop import Pace
from dspark.train.run import train
from dspark.train.settings import DataSettings, Settings
from dspark.train.teacher import Teacher
from dspark.train.world import World

PROMPTS, TOKENS, SEEDS = 4, 64, 8
NEAR = 1e-2
"""Two candidates with logits closer than this, the target's or the draft's, may swap between passes of
different shapes; a larger difference fails."""

LEAST_NOTICED = 0.05
"""Least share of rounds that notice a shifted context. A draft with random weights repeats its input, some of
which is accepted, and hardly reads its context: it has 0 to 0.01 on the embedded target, the embedded draft
0.27."""

OVERFIT_STEPS = 400
"""Enough from random weights, too; the embedded draft knows its answer by heart after 100."""
OVERFIT = 0.9
"""Least accepted share of what rounds could have drafted of the answer that was learned by heart."""

Say = Callable[[str], None]


def check(settings: Settings, say: Say) -> dict[str, Any]:
    """Runs the gates on `output/draft`, else on `start`, with prompts of the data, generated ones included.

    The last gate trains a copy of the draft on the target's answer to the first prompt, in a directory that
    is removed again.

    Raises:
        ConfigError: there is no draft, or no data yet.
    """
    draft = settings.output / "draft"
    if not draft.exists():
        if settings.start is None:
            raise ConfigError(f"{draft}: there is no draft to check; train first, or name one with --start")
        draft = resolve(settings.start, "draft")
    path = resolve(settings.target, "target")
    tokenizer = tokenizer_of(settings, path)
    generated = [place for place in directories(settings).values() if place.is_dir()]
    trained, _ = gather(settings, generated, tokenizer, read_target_config(path), say)
    prompts = [one.tokens[: one.answers[0][0]].tolist() for one in trained[:PROMPTS]]
    found = gates(settings, path, draft, prompts)
    found |= overfit(settings, path, draft, prompts[0], say)
    if found["overfit"] < OVERFIT:
        found |= {"verdict": "failed", "passed": False}
    return found


def overfit(
    settings: Settings, target: Path, draft: Path, prompt: Sequence[int], say: Say
) -> dict[str, float]:
    """Trains on one answer of the target alone, and returns as `overfit` the share of that answer's draftable
    tokens that rounds of real decoding accept (those outside a reduced vocabulary cannot be drafted)."""
    options: dict[str, Any] = {"device": settings.device, "dtype": "float32", "policy": "fixed"}
    options |= {"acceptance": "coupled"}  # the same seed draws the same text with any draft, or none
    settings.output.mkdir(parents=True, exist_ok=True)  # train on the disk that a run would use
    with (
        tempfile.TemporaryDirectory(dir=settings.output, prefix="check-") as place,
        DSparkDecoder.from_pretrained(target, **options) as plain,
    ):
        params, answer = _to_learn(plain, prompt)
        one = Path(place) / "one.jsonl"
        ids = [*answer.prompt_token_ids, *answer.token_ids]
        one.write_text(json.dumps({"token_ids": ids, "answer_start": len(answer.prompt_token_ids)}))
        train(
            dataclasses.replace(
                settings,
                output=Path(place) / "run",
                start=str(draft),
                start_layers=(),
                data=DataSettings(files=(one,), held_out=0.0, max_length=len(ids)),
                pace=Pace(
                    steps=OVERFIT_STEPS, sequences=1, report_every=OVERFIT_STEPS, checkpoint_seconds=1e9
                ),
                anchors=TOKENS,
                failed_anchors=0.0,
                micro_batch=1,
                dtype="float32",
                packaging=None,  # the one that fits the vocabulary; flat always stores its head
                save_head=True,
                save_dtype="float32",
                tensorboard=False,
            ),
            say,
            World(0, 1, parse_device(settings.device)),  # under torchrun, too, one process checks
        )
        with DSparkDecoder.from_pretrained(target, Path(place) / "run" / "draft", **options) as decoder:
            again = decoder.generate(prompt, params)
    drafted = draft_from(draft, target).target_ids
    known = set(again.token_ids) if drafted is None else set(drafted.tolist())
    return {"overfit": _learned(again, known)}


def _to_learn(plain: DSparkDecoder, prompt: Sequence[int]) -> tuple[SamplingParams, GenerationResult]:
    """An answer, and the parameters that it was drawn with. At temperature 0 small models loop: any draft can
    draft such a text, and it is not one to train on."""
    for seed in range(SEEDS):
        params = SamplingParams(
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            repetition_penalty=1.0,
            seed=seed,
            max_tokens=TOKENS,
            ignore_eos=True,
        )
        answer = plain.generate(prompt, params)
        if len(answer.token_ids) > 1 and distinct_share(answer.token_ids) >= FEWEST_DISTINCT:
            return params, answer
    raise ConfigError(
        f"{SEEDS} answers of the target to the first prompt loop or end at once: nothing to learn"
    )


def _learned(result: GenerationResult, known: set[int]) -> float:
    """Accepted tokens over those that could have been; a block ends before its first token not in `known`."""
    accepted, could, at = 0, 0, 1
    for one in result.rounds:
        block = result.token_ids[at : at + one.drafted]
        could += next((i for i, token in enumerate(block) if token not in known), len(block))
        accepted += one.accepted
        at += one.committed
    return accepted / could if could else 0.0


def gates(settings: Settings, target: Path, draft: Path, prompts: Sequence[list[int]]) -> dict[str, Any]:
    """Runs the first two gates on these prompts. `verdict` is "passed" if all is equal, up to near-ties,
    "failed" if something is not, and "inconclusive" if equality proves nothing: nothing was accepted, or the
    second gate would hardly notice a context that is one position off (`noticed`: the rounds that would)."""
    # The gates compare with the raw argmax, which a target's own default penalty would move.
    params = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=TOKENS)
    with DSparkDecoder.from_pretrained(
        target, draft, device=settings.device, dtype="float32", policy="fixed"
    ) as decoder:
        results = [decoder.generate(prompt, params) for prompt in prompts]
    model = load_target(target, device=parse_device(settings.device), dtype=parse_dtype("float32"))
    trainable = draft_from(draft, target).to(model.device).eval()
    teacher = Teacher(model, trainable.config.target_layer_ids)
    training = TrainingPass(trainable, attention=settings.attention)
    found = [_one(teacher, training, result) for result in results]
    sums = {key: sum(one[key] for one in found) for key in found[0]}
    telling = sums["drafted_accepted"] > 0 and sums["noticed"] >= LEAST_NOTICED * max(sums["rounds"], 1)
    verdict = "passed" if telling else "inconclusive"
    if sums["teacher_wrong"] or sums["rounds_wrong"]:
        verdict = "failed"
    return {"draft": str(draft), **sums, "verdict": verdict, "passed": verdict == "passed"}


def _one(teacher: Teacher, training: TrainingPass, result: GenerationResult) -> dict[str, int]:
    start = len(result.prompt_token_ids)
    tokens = np.array([*result.prompt_token_ids, *result.token_ids], np.int64)
    one = Conversation(tokens, ((start, len(tokens)),))
    states = teacher.states([one])
    with torch.no_grad():
        logits = teacher.target.project(states[0].hidden[start - 1 : -1])
    decoded = torch.from_numpy(tokens[start:, None]).to(logits.device)
    best, own = logits.max(-1).values, logits.gather(1, decoded).squeeze(1)
    wrong = int((best - own > NEAR).sum())
    # The anchors of rounds that no limit cut, and what these rounds accepted.
    anchors, accepted, at = [], [], start
    for one_round in result.rounds:
        if one_round.committed == one_round.accepted + 1 and one_round.drafted == one_round.verified > 0:
            anchors.append(at)
            accepted.append((one_round.accepted, one_round.verified))
        at += one_round.committed
    found = {"tokens": len(tokens) - start, "teacher_wrong": wrong, "rounds": len(anchors)}
    found |= {"drafted_accepted": sum(was for was, _ in accepted), "rounds_wrong": 0, "noticed": 0}
    if anchors:
        batch = collate([one], states, teacher.target.device)
        found["rounds_wrong"] = _odd(training, batch, anchors, accepted)
        shifted = dataclasses.replace(batch, taps=batch.taps.roll(-1, 1))
        found["noticed"] = _odd(training, shifted, anchors, accepted)
    return found


def _odd(
    training: TrainingPass, batch: Batch, anchors: Sequence[int], accepted: Sequence[tuple[int, int]]
) -> int:
    """How many rounds accepted a different number of tokens than the training pass agrees with."""
    positions = torch.tensor([anchors], device=batch.token_ids.device)
    ids = training.draft.target_ids

    def agreed(outputs: BlockOutputs) -> list[tuple[int, list[float]]]:
        drafted = outputs.logits.argmax(-1)
        drafted = drafted if ids is None else ids[drafted]
        agrees = ((drafted == outputs.labels.tokens) & outputs.labels.counted).cumprod(1).sum(1)
        top = outputs.logits.topk(2, dim=-1).values
        return list(zip(agrees.tolist(), (top[..., 0] - top[..., 1]).tolist(), strict=True))

    with torch.no_grad():
        kept = Anchors(positions, torch.ones_like(positions, dtype=torch.bool))
        pieces = training(batch, kept, training.draft.config.block_size, agreed)
    odd = 0
    for (agrees, close), (was, verified) in zip(chain.from_iterable(pieces), accepted, strict=True):
        offline = min(agrees, verified)
        odd += offline != was and close[min(offline, was)] > NEAR
    return odd
