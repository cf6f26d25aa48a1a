"""Writes figures to files with matplotlib (the extra `plots`)."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from dspark.errors import ConfigError
from dspark.files import check_writable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")


def require_matplotlib() -> None:
    """Raises `ConfigError` where matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise ConfigError("plots need matplotlib: pip install matplotlib")


def check_plot(path: Path | None) -> None:
    """Raises `ConfigError` if no plot can be written there; call it before the work that it will show."""
    if path is None:
        return
    require_matplotlib()
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"a plot is a file that ends in {' or '.join(SUFFIXES)}, not {path}")
    check_writable(path)


def save_plot(figure: Figure, path: Path) -> None:
    """Writes PNG or SVG, by the file's name; raises `ConfigError` if the file cannot be written."""
    try:
        figure.savefig(path, dpi=120, bbox_inches="tight")
    except OSError as error:
        raise ConfigError(f"the plot {path} cannot be written: {error}") from error
