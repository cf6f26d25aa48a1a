"""Print the packages that pyproject.toml asks for: to build and to run, or those of the extras named."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def main(extras: list[str]) -> None:
    """Print one package a line."""
    settings = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    project = settings["project"]
    wanted = [p for extra in extras for p in project["optional-dependencies"][extra]]
    if not extras:
        wanted = [*settings["build-system"]["requires"], *project["dependencies"]]
    print("\n".join(wanted))


if __name__ == "__main__":
    main(sys.argv[1:])
