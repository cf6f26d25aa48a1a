"""From a draft's checkpoint to the same draft in another packaging, tensor by tensor."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from dspark.checkpoint.calibration import FILE_NAME, read_calibrations, write_calibrations
from dspark.checkpoint.config_file import ConfigFile
from dspark.checkpoint.header import StoredTensor
from dspark.checkpoint.weights import WeightFiles
from dspark.checkpoint.write import NewTensor, copy_of, write_safetensors
from dspark.draft.config import DraftConfig
from dspark.draft.export import configs
from dspark.draft.export.borrowed import borrowed_tensors
from dspark.draft.packaging import read_draft_directory
from dspark.draft.packaging.common import EMBEDDINGS, HEAD
from dspark.draft.packaging.heads import CONFIDENCE_BIAS, CONFIDENCE_WEIGHT
from dspark.draft.parameters import stored_parameters
from dspark.draft.vocabulary import MASK, OFFSETS, read_target_ids
from dspark.errors import CheckpointError, ConfigError

SOURCES = (*configs.FORMATS, "dflash")


def export_draft(
    source: Path, output: Path, form: str, target: Path | None = None, target_name: str | None = None
) -> list[str]:
    """Writes the draft in `source` to `output` as `form`; returns remarks about what was changed.

    Weights keep their dtypes, byte by byte. `target` is needed where the format holds embeddings and output
    head and the draft does not; `target_name` is what the exported config calls it. A `calibration.json` is
    carried over.

    Raises:
        CheckpointError: the draft or the target cannot be read, or `output` holds something already.
        ConfigError: the format cannot express this draft.
    """
    config, weights = read_draft_directory(source)
    _check_expressible(config, weights, form)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise CheckpointError(f"{output}: exists and is not an empty directory")
    if form == "nested" and config.num_target_layers is None:
        config = dataclasses.replace(config, num_target_layers=_layers_of(target, weights))
    tensors, remarks = _tensors(config, weights, form, target)
    values = configs.written(config, form, target_name)
    calibrations = read_calibrations(file) if (file := source / FILE_NAME).exists() else []
    output.mkdir(parents=True, exist_ok=True)
    if calibrations:  # the drafts are the same, and so are their confidences
        write_calibrations(output / FILE_NAME, calibrations)
    write_safetensors(output / "model.safetensors", tensors)
    # Last, so that an interrupted export is not taken for a checkpoint.
    (output / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    _check_written(config, output)
    return remarks


def _check_expressible(config: DraftConfig, weights: WeightFiles, form: str) -> None:
    def refuse(why: str) -> ConfigError:
        return ConfigError(f"{weights.directory}: cannot be written as {form}: {why}")

    if form not in configs.FORMATS:
        raise ConfigError(f"format must be one of {', '.join(configs.FORMATS)}, not {form!r}")
    if config.packaging not in SOURCES:
        raise refuse(f"only {', '.join(SOURCES)} drafts can be exported, but this one is {config.packaging}")
    if form != "speculators" and OFFSETS in weights and _renames(config, weights):
        raise refuse("the format cannot hold a reduced or reordered vocabulary")
    if any(config.windows):
        rules = {"flat": (), "nested": ("sliding",), "speculators": ("anchored", "anchored, bidirectional")}
        if config.window_rule not in rules[form]:
            raise refuse(f"the format cannot express sliding layers of this kind ({config.window_rule})")
    if config.causal and form != "nested":
        raise refuse("no row of its blocks sees a later one, which the format cannot say")
    if form == "nested" and config.drop_anchor_slot and (config.markov_rank or config.enable_confidence_head):
        raise refuse("it drops the anchor's slot, and without that slot the format has no heads")
    if form == "flat":
        if config.drop_anchor_slot:
            raise refuse("it drops the anchor's slot, and the format is anchor-first")
        if list(config.target_layer_ids) != sorted(set(config.target_layer_ids)):
            raise refuse(f"its taps are {list(config.target_layer_ids)}, but the format needs ascending ones")
        if config.target_hidden_size != config.hidden_size:
            raise refuse(
                f"a tap is {config.target_hidden_size} wide and the draft {config.hidden_size}, which must "
                "be equal"
            )


def _layers_of(target: Path | None, weights: WeightFiles) -> int:
    if target is None:
        raise ConfigError(
            f"{weights.directory}: the nested format says how many layers the target has, and this draft "
            "does not; name the target"
        )
    config = ConfigFile.read(target / "config.json")
    return (config.inside("text_config") or config).integer("num_hidden_layers")


def _renames(config: DraftConfig, weights: WeightFiles) -> bool:
    tokens = read_target_ids(weights.tensors[OFFSETS], config.vocab_size)
    return config.reduced or bool((tokens != np.arange(len(tokens))).any())


def _tensors(
    config: DraftConfig, weights: WeightFiles, form: str, target: Path | None
) -> tuple[list[NewTensor], list[str]]:
    parts, remarks = dict(stored_parameters(config, weights)), []
    theirs: dict[str, StoredTensor] = {}
    if target is not None and config.hidden_size == config.target_hidden_size:
        theirs = borrowed_tensors(target, (config.vocab_size, config.hidden_size))
    if form == "flat":
        for name in (EMBEDDINGS, HEAD):
            if name in parts:
                continue
            if name not in theirs:
                raise ConfigError(
                    f"{weights.where()}: the flat format needs {name}, which this draft takes from its "
                    "target; name the target"
                )
            parts[name] = theirs[name]
            remarks.append(f"{name} is the target's")
    elif form == "nested":
        for name in (EMBEDDINGS, HEAD):
            if name in parts and name in theirs and _equal(parts[name], theirs[name]):
                del parts[name]
                remarks.append(f"{name} is left out: it equals the target's")
    tensors = [copy_of(name, stored) for name, stored in parts.items()]
    if config.enable_confidence_head and CONFIDENCE_BIAS not in parts:
        dtype = parts[CONFIDENCE_WEIGHT].dtype
        tensors.append(_constant(CONFIDENCE_BIAS, dtype, (1,), bytes(8)))
        remarks.append(f"{CONFIDENCE_BIAS} was missing, which means zero, and is written as zero")
    if OFFSETS in weights and form == "speculators":
        stored = weights.tensors[OFFSETS]
        mask = np.zeros(config.vocab_size, dtype=np.bool_)
        mask[read_target_ids(stored, config.vocab_size)] = True
        tensors += [copy_of(OFFSETS, stored), _constant(MASK, "BOOL", mask.shape, mask.tobytes())]
    return tensors, remarks


def _constant(name: str, dtype: str, shape: tuple[int, ...], content: bytes) -> NewTensor:
    size = NewTensor(name, dtype, shape, tuple).size
    return NewTensor(name, dtype, shape, lambda: [content[:size]])


def _equal(one: StoredTensor, other: StoredTensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    pieces: Iterable[tuple[bytes, bytes]] = zip(
        copy_of("", one).pieces(), copy_of("", other).pieces(), strict=True
    )
    return all(a == b for a, b in pieces)


def _check_written(config: DraftConfig, output: Path) -> None:
    """Reads the new checkpoint back and checks that everything that affects the drafts is unchanged."""
    again, _ = read_draft_directory(output)
    was, now = (_essence(one) for one in (config, again))
    if was != now:
        key = next(key for key in was if was[key] != now[key])
        raise CheckpointError(f"{output}: was written with {key} {now[key]!r}, expected {was[key]!r}")


def _essence(config: DraftConfig) -> dict[str, Any]:
    ignored = ("packaging", "architecture", "notes", "own_embeddings", "own_head")
    values = {key: value for key, value in dataclasses.asdict(config).items() if key not in ignored}
    return values if any(config.windows) else values | {"window_rule": None}
