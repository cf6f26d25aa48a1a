"""The messages of a chat as a template sees them: checked, and copied into plain JSON values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dspark.errors import RequestError, shown

# Kinds of message parts that need an encoder, which a text model lacks.
_OTHER_MEDIA = (
    "image",
    "image_url",
    "input_image",
    "video",
    "video_url",
    "audio",
    "audio_url",
    "input_audio",
)


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises `RequestError` unless `messages` is a chat of text alone."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(
            "a chat is a list of at least one message, each like {'role': 'user', 'content': '...'}"
        )
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"message {index} is {shown(message)}, expected a dict with a role")
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        for part in parts:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind in _OTHER_MEDIA:
                raise RequestError(f"message {index} holds a part of type {kind!r}; only text is supported")


def without_nulls(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages without keys whose value is `None`, as transformers gives them to templates.

    Clients send `content: null` beside tool calls, and `tool_calls: null`. Templates print the former as
    "None" and fail on the latter, while all of them handle missing keys.
    """
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def plain(value: Any) -> Any:
    """A copy in JSON's own types, so that nothing in a template reaches the caller's objects; raises
    `TypeError` or `ValueError` for what JSON does not have."""
    return json.loads(json.dumps(value, default=_as_dict))


def _as_dict(value: Any) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
