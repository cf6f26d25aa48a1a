"""A model's config.json: typed reading, with errors that name the file and the key."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from dspark.errors import CheckpointError

T = TypeVar("T")

LARGEST = 2**31 - 1
"""No size, count or token id is larger: a larger one comes from a damaged file."""

LARGEST_NUMBER = sys.float_info.max
"""Numbers are read as floats, which have a limit; JSON's integers have none."""

MOST_LAYERS = 4096


class ConfigFile:
    """A JSON object on disk. `null` counts as absent everywhere."""

    def __init__(self, path: Path, values: dict[str, Any], prefix: str = "") -> None:
        """`prefix` precedes the keys in messages: it says where in the file `values` is."""
        self.path = path
        self.values = values
        self.prefix = prefix

    @classmethod
    def read(cls, path: Path) -> ConfigFile:
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(
                f"{path.parent}: no {path.name} there, so this is not a checkpoint"
            ) from None
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: cannot be read as JSON ({error})") from error
        if not isinstance(values, dict):
            raise CheckpointError(f"{path}: expected a JSON object, found {type(values).__name__}")
        return cls(path, values)

    def inside(self, key: str) -> ConfigFile | None:
        """A nested object, to be read like the file itself, or None if absent."""
        values = self.object(key)
        return None if values is None else ConfigFile(self.path, values, f"{self.prefix}{key}.")

    def raw(self, key: str) -> Any:
        """The value as stored, or None."""
        return self.values.get(key)

    def object(self, key: str) -> dict[str, Any] | None:
        """A nested object, or None if absent."""
        value = self.raw(key)
        if value is None or isinstance(value, dict):
            return value
        raise self.wrong(key, "an object", value)

    def integer(self, key: str) -> int:
        """A required positive integer."""
        value = self.optional_integer(key)
        if value is None:
            raise CheckpointError(f"{self.path}: {self.prefix}{key} is missing; expected a positive integer")
        return value

    def optional_integer(self, key: str) -> int | None:
        """A positive integer, or None if absent."""
        return self.agreed([(key, self.raw(key))], positive_integer, "a positive integer")

    def number(self, key: str, default: float) -> float:
        value = self.raw(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST_NUMBER:
            raise self.wrong(key, "a number", value)
        return float(value)

    def positive_number(self, key: str, default: float) -> float:
        """A number above 0."""
        value = self.number(key, default)
        if value <= 0.0:
            raise self.wrong(key, "a number above 0", value)
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false", value)
        return value

    def text(self, key: str, default: str) -> str:
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(key, "a string", value)
        return value

    def architectures(self) -> list[str]:
        """The entries of `architectures`, possibly none."""
        value = self.raw("architectures")
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise self.wrong("architectures", "a list of names", value)
        return value

    def layer_windows(self, layers: int) -> tuple[int | None, ...]:
        """The attention window of each layer (None: full attention), from `layer_types` and
        `sliding_window`."""
        if layers > MOST_LAYERS:
            raise self.wrong("num_hidden_layers", f"at most {MOST_LAYERS}", layers)
        kinds = self.raw("layer_types")
        if kinds is None:
            kinds = self._layer_types_of_older_configs(layers)
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise self.wrong("layer_types", f"a list of {layers} entries, one for each layer", kinds)
        unknown = sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"})
        if unknown:
            raise self.wrong("layer_types", "full_attention or sliding_attention", ", ".join(unknown))
        if "sliding_attention" not in kinds:
            return (None,) * layers
        window = self.integer("sliding_window")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)

    def _layer_types_of_older_configs(self, layers: int) -> list[str]:
        """Before `layer_types`, Qwen gave a switch and the first sliding layer (transformers' own rule)."""
        first = layers
        is_on = self.flag("use_sliding_window", False)
        if is_on and "sliding_window" not in self.values:  # transformers takes 4096; null means none
            raise self.wrong("sliding_window", "a number of positions, as use_sliding_window is true", None)
        if is_on and self.raw("sliding_window") is not None:
            first = int(self.number("max_window_layers", 28))
        return ["full_attention" if layer < first else "sliding_attention" for layer in range(layers)]

    def refuse_quantised(self) -> None:
        """Raises `CheckpointError` if the config says that weights are quantised."""
        if self.raw("quantization_config") is not None:
            raise CheckpointError(
                f"{self.path}: {self.prefix}quantization_config is set; quantised weights are not supported"
            )

    def agreed(
        self,
        places: Sequence[tuple[str, Any]],
        convert: Callable[[Any], T | None],
        expected: str = "another kind of value",
    ) -> T | None:
        """The one value that several places give, or None if none gives any.

        Raises:
            CheckpointError: `convert` does not understand a value, or two places give different values.
        """
        found: tuple[str, T] | None = None
        for name, raw in places:
            if raw is None:
                continue
            value = convert(raw)
            if value is None:
                raise self.wrong(name, expected, raw)
            if found is not None and found[1] != value:
                raise CheckpointError(
                    f"{self.path}: {self.prefix}{found[0]} is {found[1]!r} but {self.prefix}{name} is "
                    f"{value!r}; they must be equal"
                )
            found = found or (name, value)
        return None if found is None else found[1]

    def wrong(self, key: str, expected: str, found: Any) -> CheckpointError:
        """The error for a value of the wrong kind."""
        return CheckpointError(
            f"{self.path}: {self.prefix}{key} must be {expected}, found {shortened(found)}"
        )


def shortened(value: Any) -> str:
    """`repr`, cut if it would fill the screen."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def positive_integer(value: Any) -> int | None:
    """`value` if it is a positive integer, else None."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return value if is_integer and 0 < value <= LARGEST else None


def boolean(value: Any) -> bool | None:
    """`value` if it is true or false, else None."""
    return value if isinstance(value, bool) else None


def string(value: Any) -> str | None:
    """`value` if it is a string, else None."""
    return value if isinstance(value, str) else None
