"""Turns a user's name for a model into a directory in the Hugging Face layout."""

from __future__ import annotations

import re
from os import PathLike
from pathlib import Path
from typing import Literal

from dspark.errors import CheckpointError, first_line
from dspark.paths import expanded, is_directory, is_file
from dspark.pretrained.cache import Progress, log
from dspark.pretrained.smollm2 import smollm2_directory

Role = Literal["target", "draft"]

_HERE = Path(__file__).parent
_KNOWN: dict[Role, tuple[str, ...]] = {
    "target": ("tiny", "smollm2"),
    "draft": ("tiny-draft", "smollm2-draft"),
}


def resolve(name_or_path: str | PathLike[str], role: Role, progress: Progress = log) -> Path:
    """The directory of a model: an existing directory as it is, a known name, or a Hub id `owner/name`.

    Known targets are `tiny` (embedded) and `smollm2` (converted into the cache on first use), known drafts
    `tiny-draft` (embedded) and `smollm2-draft` (in a source checkout). Hub ids need the extra `hub`.
    A directory wins over a known name. CheckpointError if nothing can be found.
    """
    path = expanded(name_or_path, role)
    name = str(name_or_path)
    if name and is_directory(path):  # an empty name would be the working directory
        return path
    if name in _KNOWN[role]:
        return _known(name, progress)
    if is_file(path):
        raise CheckpointError(
            f"{path} is a file; a {role} is given as the directory that holds its config.json"
        )
    other: Role = "draft" if role == "target" else "target"
    if name in _KNOWN[other]:
        raise CheckpointError(
            f"{name!r} is a {other}, not a {role}; known {role}s: {', '.join(_KNOWN[role])}"
        )
    if is_hub_id(name):
        return _from_hub(name, role, progress)
    raise CheckpointError(
        f"there is no directory {name!r}, and it is not a known {role}; {_known_sentence(role)}"
    )


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of a Hub id, `owner/name`."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name) is not None


def _known(name: str, progress: Progress) -> Path:
    if name == "smollm2":
        return smollm2_directory(progress)
    if name == "smollm2-draft":
        checkout = _HERE.parents[2] / "models" / "smollm2-draft"
        if not checkout.is_dir():
            raise CheckpointError(
                "smollm2-draft is not part of the installed package: give the path of models/smollm2-draft "
                "in a checkout of the repository"
            )
        return checkout
    return _HERE / "tiny" / {"tiny": "target", "tiny-draft": "draft"}[name]


def _from_hub(name: str, role: Role, progress: Progress) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CheckpointError(
            f"there is no directory {name!r}; {_known_sentence(role)}; "
            "to fetch from the Hugging Face Hub: pip install huggingface_hub"
        ) from error
    progress(f"fetching {name} from the Hugging Face Hub, unless it is cached")
    try:
        # No pickled weights and no code: neither would be loaded. A separate mask embedding is not loaded
        # either, but refused, so it has to be there. Folders and consolidated files repeat the weights.
        found = snapshot_download(
            name,
            allow_patterns=["*.json", "*.safetensors", "*.jinja", "mask_embedding.pt"],
            ignore_patterns=["*/*", "consolidated*"],
        )
    except Exception as error:  # the library's errors come from several packages; each is a model not found
        raise CheckpointError(
            f"there is no directory {name!r}, and fetching it from the Hugging Face Hub failed: "
            f"{first_line(error)}"
        ) from error
    return Path(found)


def _known_sentence(role: Role) -> str:
    return f"known names: {', '.join(_KNOWN[role])}"
