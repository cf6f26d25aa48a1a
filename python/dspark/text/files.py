"""The small JSON files beside a model that say how its text begins, ends and is laid out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dspark.checkpoint.config_file import LARGEST
from dspark.errors import CheckpointError, shown


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, empty if there is no such file; CheckpointError for anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, expected a JSON object")
    return value


def eos_token_ids(directory: Path) -> tuple[int, ...]:
    """The token ids that end a text: those of `generation_config.json`, else of `config.json`, else none.

    Works without a tokenizer, so token-id prompts end where text prompts do.
    """
    for name in ("generation_config.json", "config.json"):
        values = read_object(directory / name)
        found = values.get("eos_token_id")
        if found is None and isinstance(text := values.get("text_config"), dict):
            found = text.get("eos_token_id")  # multimodal wrappers keep it with the text model
        if found is None:
            continue
        ids = found if isinstance(found, list) else [found]
        if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i <= LARGEST for i in ids):
            raise CheckpointError(
                f"{directory / name}: eos_token_id is {shown(found)}, expected a token id or a list of them"
            )
        return tuple(dict.fromkeys(ids))
    return ()


def special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """The named tokens (`bos_token`, `eos_token`, ...) of a tokenizer's settings, by name."""
    found: dict[str, str] = {}
    for key, value in settings.items():
        if not key.endswith("_token") or key.startswith("add_"):
            continue
        content = value.get("content") if isinstance(value, dict) else value  # newer files store objects
        if isinstance(content, str):
            found[key] = content
    return found
