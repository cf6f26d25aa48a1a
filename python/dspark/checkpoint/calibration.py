"""`calibration.json`: temperatures of a draft's confidence head, by the regime that they were fitted in.

A confidence is a probability of acceptance under one rule, one way of sampling and one number of Markov
candidates; the file holds a list with an entry for each such combination.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dspark.checkpoint.config_file import LARGEST_NUMBER, ConfigFile, positive_integer
from dspark.errors import CheckpointError
from dspark.files import write_whole

FILE_NAME = "calibration.json"
VERSION = 1
RULES = ("rejection", "block", "coupled")
"""How drafted tokens are accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """How tokens are sampled and accepted."""

    acceptance: str
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    markov_candidates: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The keys of an entry."""
        return asdict(self)

    def __str__(self) -> str:
        parts = [self.acceptance, f"temperature {self.temperature:g}"]
        for name, neutral in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0), ("markov_candidates", None)):
            if (value := getattr(self, name)) != neutral:
                parts.append(f"{name} {value:g}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The temperatures of one regime, and where they come from."""

    regime: Regime
    block_size: int
    """Tokens drafted per block."""
    temperatures: tuple[float, ...]
    """One for each of them."""
    acceptance_by_position: tuple[float, ...] = ()
    """How often each position was kept when the one before it was, as far as there were enough rounds; the
    throughput policy starts from this."""
    rounds: int
    """Rounds that the temperatures were fitted to."""
    choosing_rounds: int | None = None
    """Rounds of other prompts, by which the final temperatures were chosen. Older files lack this: there, the
    rounds of `ece_before` and `ece_after` chose, and their prompts are not among `fitted_prompts`."""
    fitted_prompts: tuple[str, ...] = ()
    """Digests of the prompts of all these rounds (`dspark.calibrate.prompts.digest`); empty if not known."""
    template_options: dict[str, Any] = field(default_factory=dict)
    """Keywords that the target's chat template was given; empty if the file does not say."""
    ece_before: float | None
    """Calibration error of the survivals, over all positions, on rounds of prompts neither fitted to
    nor used for the choice; None without such rounds."""
    ece_after: float | None
    target: str
    date: str
    dspark: str

    @property
    def key(self) -> tuple[Regime, int]:
        """What identifies an entry: no two entries of a file have the same."""
        return self.regime, self.block_size

    def to_json(self) -> dict[str, Any]:
        """The entry as it is stored."""
        own = {name: getattr(self, name) for name in self.__slots__ if name != "regime"}
        return {**self.regime.to_json(), **own}


def read_calibrations(path: Path) -> list[Entry]:
    """The entries of a file.

    Raises `CheckpointError` naming the file, the key, what was expected and what was found.
    """
    file = ConfigFile.read(path)
    if (version := file.raw("version")) != VERSION:
        raise file.wrong("version", str(VERSION), version)
    entries = file.raw("entries")
    if not isinstance(entries, list):
        raise file.wrong("entries", "a list of objects", entries)
    read = []
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise file.wrong(f"entries[{number}]", "an object", entry)
        read.append(_entry(ConfigFile(path, entry, f"entries[{number}].")))
    keys = [entry.key for entry in read]
    for number, key in enumerate(keys):
        if key in keys[:number]:
            raise CheckpointError(
                f"{path}: entries[{keys.index(key)}] and entries[{number}] are both for {key[0]} and blocks "
                f"of {key[1]}; expected one"
            )
    return read


def write_calibrations(path: Path, entries: Sequence[Entry]) -> None:
    """Adds entries to a file, replacing those with the same regime and block size; writes all or nothing.

    Raises `CheckpointError` if the file is there and damaged, or cannot be written.
    """
    merged = {entry.key: entry for entry in (read_calibrations(path) if path.exists() else [])}
    merged |= {entry.key: entry for entry in entries}
    content = {"version": VERSION, "entries": [entry.to_json() for entry in merged.values()]}
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    try:
        write_whole(path, text)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written ({error}): name another file with --output"
        ) from error


def _entry(file: ConfigFile) -> Entry:
    block_size = file.integer("block_size")
    return Entry(
        regime=Regime(
            acceptance=_rule(file),
            temperature=_number(file, "temperature", 0.0, math.inf),
            top_k=_whole(file, "top_k"),
            top_p=_number(file, "top_p", 0.0, 1.0),
            min_p=_number(file, "min_p", 0.0, 1.0),
            markov_candidates=file.optional_integer("markov_candidates"),
        ),
        block_size=block_size,
        temperatures=_temperatures(file, block_size),
        acceptance_by_position=_acceptance(file, block_size),
        rounds=_whole(file, "rounds"),
        choosing_rounds=None if file.raw("choosing_rounds") is None else _whole(file, "choosing_rounds"),
        fitted_prompts=_digests(file),
        template_options=file.object("template_options") or {},
        ece_before=_optional_number(file, "ece_before"),
        ece_after=_optional_number(file, "ece_after"),
        target=file.text("target", ""),
        date=file.text("date", ""),
        dspark=file.text("dspark", ""),
    )


def _rule(file: ConfigFile) -> str:
    rule = file.raw("acceptance")
    if not isinstance(rule, str) or rule not in RULES:
        raise file.wrong("acceptance", f"one of {', '.join(RULES)}", rule)
    return rule


def _whole(file: ConfigFile, key: str) -> int:
    value = file.raw(key)
    if value == 0 and isinstance(value, int) and not isinstance(value, bool):
        return 0
    if positive_integer(value) is None:
        raise file.wrong(key, "a whole number of at least 0", value)
    return int(value)


def _number(file: ConfigFile, key: str, low: float, high: float) -> float:
    value = file.raw(key)
    if not _is_number(value) or not low <= value <= high:
        span = f"from {low:g} to {high:g}" if math.isfinite(high) else f"of at least {low:g}"
        raise file.wrong(key, f"a number {span}", value)
    return float(value)


def _optional_number(file: ConfigFile, key: str) -> float | None:
    return None if file.raw(key) is None else _number(file, key, 0.0, 1.0)


def _temperatures(file: ConfigFile, block_size: int) -> tuple[float, ...]:
    values = file.raw("temperatures")
    if not isinstance(values, list) or len(values) != block_size:
        found = f"a list of {len(values)}" if isinstance(values, list) else values
        raise file.wrong("temperatures", f"a list of block_size = {block_size} numbers", found)
    for value in values:
        if not _is_number(value) or value <= 0:
            raise file.wrong("temperatures", "a list of numbers above 0", values)
    return tuple(float(value) for value in values)


def _acceptance(file: ConfigFile, block_size: int) -> tuple[float, ...]:
    """Acceptance by position; older files have none."""
    values = file.raw("acceptance_by_position") or []
    if not isinstance(values, list) or len(values) > block_size:
        raise file.wrong("acceptance_by_position", f"a list of at most {block_size} numbers", values)
    if not all(_is_number(value) and 0.0 <= value <= 1.0 for value in values):
        raise file.wrong("acceptance_by_position", "a list of numbers from 0 to 1", values)
    return tuple(float(value) for value in values)


def _digests(file: ConfigFile) -> tuple[str, ...]:
    """Digests of prompts; older files have none."""
    values = file.raw("fitted_prompts") or []
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise file.wrong("fitted_prompts", "a list of texts", values)
    return tuple(values)


def _is_number(value: Any) -> bool:
    """Whether it is a number; `NaN` and `Infinity`, which Python's JSON also reads, are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST_NUMBER
