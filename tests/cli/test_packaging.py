"""An installed dspark: light to import, one version, typed, with the embedded pair and no planted bugs."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import dspark
from dspark import _core, errors
from places import ROOT

PACKAGE = Path(dspark.__file__).parent
# What a plain import must not pull in: each costs from tens of milliseconds to seconds.
HEAVY = ("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "gguf", "jinja2", "asyncio")


def settings(name: str) -> dict[str, object]:
    return tomllib.loads((ROOT / name).read_text(encoding="utf-8"))


def test_importing_dspark_imports_nothing_heavy() -> None:
    code = f"import dspark, sys; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_error_is_a_public_name() -> None:
    kinds = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert "KernelError" in kinds and kinds <= set(dspark.__all__)


def test_the_version_is_said_once_and_the_same_everywhere() -> None:
    assert dspark.__version__ == settings("Cargo.toml")["workspace"]["package"]["version"]  # type: ignore[index]
    assert dspark.__version__ == metadata.version("dspark")


def test_the_type_information_and_the_embedded_pair_are_in_the_package() -> None:
    tiny = PACKAGE / "pretrained" / "tiny"
    wanted = [PACKAGE / "py.typed", PACKAGE / "_core.pyi", tiny / "target" / "tokenizer.json"]
    wanted += [
        tiny / part / name for part in ("target", "draft") for name in ("config.json", "model.safetensors")
    ]
    assert [path for path in wanted if not path.is_file()] == []


def test_the_command_line_is_installed() -> None:
    (entry,) = metadata.entry_points(group="console_scripts", name="dspark")
    assert callable(entry.load())


def test_the_planted_bugs_are_not_built_into_the_package() -> None:
    assert settings("pyproject.toml")["tool"]["maturin"]["features"] == ["python"]  # type: ignore[index]
    features = settings("rust/Cargo.toml")["features"]
    assert isinstance(features, dict)
    assert "default" not in features
    assert features["mutants"] == []
    assert "mutants" not in features["python"]


def test_kernels_are_embedded_and_no_folder_of_theirs_is_installed() -> None:
    """In a wheel a folder `cuda` would shadow NVIDIA's package; an sdist has to bring what is embedded."""
    kernels = ROOT / "cuda" / "kernels"
    assert sorted(name for name, _ in _core.kernel_units()) == sorted(
        path.stem for path in kernels.glob("*.cu")
    )
    include = settings("pyproject.toml")["tool"]["maturin"]["include"]  # type: ignore[index]
    assert {"path": "cuda/**/*", "format": "sdist"} in include  # type: ignore[operator]
    assert not any("cuda" in entry["path"] for entry in include if entry["format"] != "sdist")  # type: ignore[attr-defined]
    assert not (ROOT / "python" / "cuda").exists()


def test_every_package_that_the_sources_need_is_listed() -> None:
    listed = subprocess.run(
        [sys.executable, ROOT / "scripts" / "requirements.py"], capture_output=True, text=True, check=True
    )
    names = {line.split(">")[0] for line in listed.stdout.split()}
    assert names >= {"maturin", "torch", "numpy", "safetensors", "tokenizers", "jinja2"}


def test_an_environment_made_by_halves_is_not_taken_for_whole(tmp_path: Path) -> None:
    """As where Debian's python3-venv is missing: the interpreter is there, pip is not."""
    halfway = tmp_path / "python"
    halfway.write_text(
        f"""#!/bin/sh
if [ "$2" = venv ]; then mkdir -p "$3/bin"; ln -s {sys.executable} "$3/bin/python"; exit 1; fi
exec {sys.executable} "$@"
"""
    )
    halfway.chmod(0o755)
    done = subprocess.run(
        ["sh", ROOT / "scripts" / "venv.sh", tmp_path / "made", halfway, ""],
        env={"PATH": "/usr/bin:/bin", "DSPARK_DISK_GB": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "python3-venv" in done.stderr
    assert not (tmp_path / "made").exists()
    theirs = tmp_path / "theirs" / "file"
    theirs.parent.mkdir()
    theirs.write_text("kept")
    subprocess.run(
        ["sh", ROOT / "scripts" / "venv.sh", theirs.parent, halfway, ""],
        env={"PATH": "/usr/bin:/bin", "DSPARK_DISK_GB": "0"},
        capture_output=True,
    )
    assert theirs.read_text() == "kept"
