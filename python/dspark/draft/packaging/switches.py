"""Switches that trainers spell in several places."""

from __future__ import annotations

from typing import Any

from dspark.checkpoint.config_file import LARGEST, MOST_LAYERS, ConfigFile, boolean, positive_integer, string

BLOCKS = ("dflash_config", "dspark_config")
PREFIX = "dspark_"
HEAD_SWITCHES = ("markov_rank", "markov_head_type", "enable_confidence_head")


class Switches:
    """Reads a key from top level, `dflash_config`, `dspark_config` and as `dspark_<key>` of any of them.

    The same value in several places is fine; two different values are refused with both places named.
    """

    def __init__(self, config: ConfigFile) -> None:
        self.config = config
        self._blocks: list[tuple[str, dict[str, Any]]] = [("", config.values)]
        for name in BLOCKS:
            if (block := config.object(name)) is not None:
                self._blocks.append((f"{name}.", block))

    def places(self, key: str) -> list[tuple[str, Any]]:
        """Every place that may spell `key`, with what is there."""
        return [
            (f"{where}{spelling}", block.get(spelling))
            for where, block in self._blocks
            for spelling in (key, PREFIX + key)
        ]

    def raw(self, key: str) -> Any:
        """The one value as stored, or None."""
        return self.config.agreed(self.places(key), lambda value: value)

    def names_a_head(self) -> bool:
        """Whether any switch of DSpark's heads is given."""
        return any(self.raw(key) is not None for key in HEAD_SWITCHES)

    def positive(self, key: str) -> int | None:
        return self.config.agreed(self.places(key), positive_integer, "a positive integer")

    def count(self, key: str) -> int | None:
        """An integer from 0."""
        return self.config.agreed(self.places(key), _count, "an integer from 0")

    def flag(self, *keys: str) -> bool | None:
        """`keys` are spellings of one switch."""
        places = [place for key in keys for place in self.places(key)]
        return self.config.agreed(places, boolean, "true or false")

    def text(self, key: str) -> str | None:
        return self.config.agreed(self.places(key), string, "a string")

    def number(self, key: str) -> float | None:
        return self.config.agreed(self.places(key), _number, "a number")

    def integers(self, key: str) -> tuple[int, ...] | None:
        return self.config.agreed(self.places(key), _integers, "a list of integers")


def _count(value: Any) -> int | None:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return value if is_integer and 0 <= value <= LARGEST else None


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) <= LARGEST else None


def _integers(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, list) or not value:
        return None
    if not all(isinstance(entry, int) and not isinstance(entry, bool) for entry in value):
        return None
    if len(value) > MOST_LAYERS:
        return None
    return tuple(value)
