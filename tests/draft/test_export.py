"""`dspark export`: the same drafts in every packaging, to the last bit, and what a packaging cannot say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from commandline import run
from dspark.checkpoint import inspect_checkpoint
from dspark.draft import DSparkDraftModel, load_draft
from dspark.draft.export import export_draft
from dspark.errors import CheckpointError, ConfigError
from dspark.pretrained import resolve
from dspark.serve.heads import heads_to_core
from dspark.target import load_target
from model_zoo import (
    DRAFT,
    HIDDEN,
    VOCAB,
    draft_tensors,
    flat_config,
    nested_config,
    target_config,
    target_tensors,
    write_checkpoint,
    write_target,
)
from packaging_zoo import SOME, dflash_config, reduced, speculators_config
from plain_draft import LINEAR, WINDOW, YARN, taps_of

PLAIN: dict[str, Any] = {"kind": None, "confidence": None}
NOTHING: dict[str, Any] = {"markov_rank": 0, "markov_head_type": None, "enable_confidence_head": False}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
ODD_YARN = YARN | {"beta_fast": 24.0, "beta_slow": 2.0, "attention_factor": 1.3, "truncate": False}
ALL = ("flat", "nested", "speculators")


def older(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    heads = ("markov_head", "confidence_head")
    return {f"logit_head.{n}" if n.startswith(heads) else n: t for n, t in tensors.items()}


def without_bias(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name != "confidence_head.proj.bias"}


# Each draft: config, tensors, and the formats that can say it.
CASES: dict[str, tuple[dict[str, Any], dict[str, Tensor], tuple[str, ...]]] = {
    "flat": (flat_config(), draft_tensors(own=True), ALL),
    "flat gated": (flat_config(markov_head_type="gated"), draft_tensors(own=True, kind="gated"), ALL),
    "nested": (nested_config(), draft_tensors(own=False), ALL),
    "nested rnn, older names": (
        nested_config({"markov_head_type": "rnn"}),
        older(draft_tensors(own=False, kind="rnn")),
        ALL,
    ),
    "no confidence bias": (nested_config(), without_bias(draft_tensors(own=False)), ALL),
    "confidence without Markov": (
        nested_config({**NOTHING, "enable_confidence_head": True}),
        draft_tensors(own=False, kind=None, confidence=HIDDEN),
        ALL,
    ),
    "no heads": (nested_config(NOTHING), draft_tensors(own=False, **PLAIN), ALL),
    "wider training": (nested_config(training_block_size=9), draft_tensors(own=False), ALL),
    "taps that do not ascend": (
        nested_config({"target_layer_ids": [2, -1, 1]}),
        draft_tensors(own=False),
        ("nested", "speculators"),
    ),
    "biases": (nested_config(attention_bias=True), draft_tensors(own=False, bias=True), ALL),
    "yarn": (nested_config(rope_parameters=ODD_YARN), draft_tensors(own=False), ALL),
    "linear": (nested_config(rope_parameters=LINEAR), draft_tensors(own=False), ALL),
    "llama3": (nested_config(rope_parameters=LLAMA3), draft_tensors(own=False), ALL),
    "sliding": (nested_config(**WINDOW), draft_tensors(own=False), ("nested",)),
    "causal": (nested_config(is_causal=True), draft_tensors(own=False), ("nested",)),
    "causal and sliding": (nested_config({"causal": True}, **WINDOW), draft_tensors(own=False), ("nested",)),
    "causal dflash": (dflash_config(is_causal=True), draft_tensors(own=False, **PLAIN), ("nested",)),
    "anchored": (speculators_config(**WINDOW), draft_tensors(own=False), ("speculators",)),
    "bidirectional": (
        speculators_config(**WINDOW, sliding_window_non_causal=True),
        draft_tensors(own=False),
        ("speculators",),
    ),
    "dflash": (dflash_config(), draft_tensors(own=False, **PLAIN), ("nested", "speculators")),
    "dropped slot, rnn": (
        speculators_config(sample_from_anchor=False, markov_head_type="rnn"),
        draft_tensors(own=False, kind="rnn"),
        ("speculators",),
    ),
    "reduced": (
        speculators_config(draft_vocab_size=16),
        reduced(draft_tensors(own=True)),
        ("speculators",),
    ),
    "reduced, out of order": (
        nested_config({"draft_vocab_size": 16}),
        reduced(draft_tensors(own=True), SOME[5:] + SOME[:5]),
        ("speculators",),
    ),
}


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"), "qwen3")


def outcome(draft: DSparkDraftModel) -> list[Tensor]:
    """Everything that decides about drafts: two blocks' states and base logits, and the heads."""
    found: list[Tensor] = []
    context, taps = draft.new_context(), taps_of(40)
    with torch.inference_mode():
        for start, stop in ((0, 7), (7, 40)):
            draft.extend([(context, stop - start)], taps[start:stop])
            found += draft.block([9], [context])
    for part in heads_to_core(draft).values():
        if isinstance(part, dict):
            found += [torch.tensor([hash(v)]) if isinstance(v, str | bool) else v for v in part.values()]
        else:
            found.append(torch.tensor(part))
    return found


def equal(one: DSparkDraftModel, other: DSparkDraftModel) -> bool:
    pairs = list(zip(outcome(one), outcome(other), strict=True))
    return all(a.shape == b.shape and (a.double() - b.double()).abs().max() < 1e-12 for a, b in pairs)


@pytest.mark.parametrize("case", CASES)
def test_a_round_trip_through_every_format(case: str, target_path: Path, tmp_path: Path) -> None:
    config, tensors, formats = CASES[case]
    source = write_checkpoint(tmp_path / "source", config, tensors)
    target = load_target(target_path)
    draft = load_draft(source, target=target)
    for form in ALL:
        output = tmp_path / form
        if form not in formats:
            with pytest.raises(ConfigError, match=f"cannot be written as {form}: "):
                export_draft(source, output, form, target_path)
            assert not output.exists()
            continue
        export_draft(source, output, form, target_path, "the target")
        exported = load_draft(output, target=target)
        expected = "dflash" if form == "nested" and draft.config.drop_anchor_slot else form
        assert exported.config.packaging == expected
        assert equal(draft, exported)
        # And on through another format that can say it.
        last = formats[(formats.index(form) + 1) % len(formats)]
        export_draft(output, tmp_path / f"{form}-{last}", last, target_path)
        assert equal(draft, load_draft(tmp_path / f"{form}-{last}", target=target))


def test_the_comparison_would_see_a_difference(target_path: Path, tmp_path: Path) -> None:
    target = load_target(target_path)
    one, other = (
        load_draft(write_checkpoint(tmp_path / name, config, draft_tensors(own=False)), target=target)
        for name, config in (
            ("a", nested_config()),
            ("b", nested_config(rope_parameters=YARN)),
        )
    )
    assert equal(one, one) and not equal(one, other)


def test_weights_are_copied_byte_by_byte(tmp_path: Path) -> None:
    halves = {name: tensor.to(torch.bfloat16) for name, tensor in draft_tensors(own=True).items()}
    halves["norm.weight"] = halves["norm.weight"].float()
    source = write_checkpoint(tmp_path / "source", flat_config(), halves)
    export_draft(source, tmp_path / "out", "speculators")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == halves.keys()
    assert all(written[name].dtype == t.dtype and torch.equal(written[name], t) for name, t in halves.items())


@pytest.mark.parametrize("tied", [True, False])
def test_flat_takes_embeddings_and_head_from_the_target(tied: bool, tmp_path: Path) -> None:
    target_path = write_target(tmp_path / "target", "llama", tie_word_embeddings=tied)
    theirs = target_tensors(target_config("llama", tie_word_embeddings=tied))
    source = write_checkpoint(tmp_path / "source", nested_config(), draft_tensors(own=False))
    with pytest.raises(ConfigError, match=r"the flat format needs embed_tokens.weight.*name the target"):
        export_draft(source, tmp_path / "flat", "flat")
    assert not (tmp_path / "flat").exists()
    remarks = export_draft(source, tmp_path / "flat", "flat", target_path)
    assert len(remarks) == 2
    written = load_file(tmp_path / "flat" / "model.safetensors")
    assert torch.equal(written["embed_tokens.weight"], theirs["model.embed_tokens.weight"])
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    assert torch.equal(written["lm_head.weight"], theirs[head])
    assert load_draft(tmp_path / "flat", target=None).config.own_head
    # Back again: what equals the target's is left out.
    assert len(export_draft(tmp_path / "flat", tmp_path / "nested", "nested", target_path)) == 2
    assert not inspect_checkpoint(tmp_path / "nested")["own_embeddings"]


def test_a_target_that_does_not_fit_or_cannot_be_copied(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", nested_config(), draft_tensors(own=False))
    other = write_target(tmp_path / "other", "llama", vocab_size=VOCAB + 1)
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight has the wrong shape"):
        export_draft(source, tmp_path / "out", "flat", other)
    config = target_config("llama", final_logit_softcapping=30.0)
    capped = write_checkpoint(tmp_path / "capped", config, target_tensors(config))
    with pytest.raises(CheckpointError, match="caps its logits"):
        export_draft(source, tmp_path / "out", "flat", capped)


def test_what_is_there_is_never_overwritten(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", nested_config(), draft_tensors(own=False))
    before = (source / "config.json").read_text()
    for output in (source, source / "config.json"):
        with pytest.raises(CheckpointError, match="exists and is not an empty directory"):
            export_draft(source, output, "speculators")
    assert (source / "config.json").read_text() == before


def test_the_exported_configs_have_what_other_loaders_demand(target_path: Path, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", nested_config(), draft_tensors(own=False))

    def read(form: str) -> Any:
        return json.loads((tmp_path / form / "config.json").read_text())

    for form in ALL:
        export_draft(source, tmp_path / form, form, target_path, "some/target")
    # The attributes that DeepSpec's class asserts.
    flat = read("flat")
    needed = ("target_layer_ids", "mask_token_id", "num_anchors", "enable_confidence_head", "markov_rank")
    assert all(flat[key] is not None for key in (*needed, "markov_head_type", "confidence_head_with_markov"))
    nested = read("nested")
    assert nested["dflash_config"]["projector_type"] == "dspark"
    assert nested["dflash_config"]["attention_mode"] == "gqa"
    assert nested["num_target_layers"] == DRAFT["num_target_layers"]
    speculators = read("speculators")
    assert speculators["speculators_config"]["verifier"]["name_or_path"] == "some/target"
    assert (
        speculators["aux_hidden_state_layer_ids"] == [1, 2, 3] and speculators["sample_from_anchor"] is True
    )
    assert "vocab_size" in speculators["transformer_layer_config"]


def test_what_only_the_target_can_say_is_taken_from_it(target_path: Path, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", speculators_config(), draft_tensors(own=False))
    with pytest.raises(ConfigError, match=r"how many layers the target has.*name the target"):
        export_draft(source, tmp_path / "out", "nested")
    export_draft(source, tmp_path / "out", "nested", target_path)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (
        config["num_target_layers"]
        == json.loads((target_path / "config.json").read_text())["num_hidden_layers"]
    )


def test_exported_windows_survive_the_configuration_of_transformers(tmp_path: Path) -> None:
    from transformers import Qwen3Config

    source = write_checkpoint(tmp_path / "source", speculators_config(**WINDOW), draft_tensors(own=False))
    export_draft(source, tmp_path / "out", "speculators")
    inner = json.loads((tmp_path / "out" / "config.json").read_text())["transformer_layer_config"]
    assert Qwen3Config(**inner).sliding_window == WINDOW["sliding_window"]


@pytest.mark.parametrize("key", ["logit_scale", "logits_scaling"])
def test_a_head_that_is_scaled_is_not_borrowed(tmp_path: Path, key: str) -> None:
    source = write_checkpoint(tmp_path / "source", nested_config(), draft_tensors(own=False))
    config = target_config("llama", **{key: 8.0})
    scaled = write_checkpoint(tmp_path / "scaled", config, target_tensors(config))
    with pytest.raises(CheckpointError, match=f"{key} is 8.0: this target scales its logits"):
        export_draft(source, tmp_path / "out", "flat", scaled)
    config = target_config("llama")
    tensors = target_tensors(config)
    biased = {**tensors, "lm_head.bias": torch.zeros(len(tensors["lm_head.weight"]))}
    path = write_checkpoint(tmp_path / "biased", config, biased)
    with pytest.raises(CheckpointError, match=r"has a bias, lm_head\.bias"):
        export_draft(source, tmp_path / "out", "flat", path)


def test_the_command(tmp_path: Path) -> None:
    output = tmp_path / "out"
    code, out, _ = run("export", "tiny-draft", "--format", "speculators", "--output", output, "--json")
    shown = json.loads(out)
    assert code == 0 and shown["format"] == "speculators" and shown["draft"]["packaging"] == "speculators"
    assert shown["draft"]["parameters"] == inspect_checkpoint(resolve("tiny-draft", "draft"))["parameters"]
    code, out, err = run(
        "export", output, "--format", "nested", "--output", tmp_path / "n", "--target", "tiny"
    )
    assert code == 0 and "nested" in out
    code, _, err = run("export", "tiny-draft", "--format", "nested", "--output", output)
    assert code == 2 and "not an empty directory" in err
    code, _, err = run("export", "tiny-draft", "--format", "gguf", "--output", tmp_path / "g")
    assert code == 2 and "--format" in err


def test_an_exported_draft_drafts_the_same_text(tmp_path: Path) -> None:
    from dspark import DSparkDecoder, SamplingParams

    params = SamplingParams(max_tokens=40, seed=3, temperature=0.8)
    outcomes = []
    for form in (None, *ALL):
        draft: Any = "tiny-draft"
        if form is not None:
            draft = tmp_path / form
            export_draft(resolve("tiny-draft", "draft"), draft, form, resolve("tiny", "target"))
        with DSparkDecoder.from_pretrained(
            "tiny", draft, policy="fixed", device="cpu", dtype="float32"
        ) as decoder:
            result = decoder.generate("import os\n", params)
            outcomes.append((result.token_ids, [(r.drafted, r.accepted) for r in result.rounds]))
    assert outcomes[1:] == outcomes[:1] * 3
