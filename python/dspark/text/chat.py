"""Chat templates: from a list of messages to the text that the model was trained to continue.

A template is code that came with a checkpoint, so it runs in jinja2's sandbox. Templates rely on what
transformers gives them: block trimming, `break` and `continue`, `raise_exception`, `strftime_now`, a
`tojson` that leaves `<` alone, and `{% generation %}` marks, which mean nothing here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dspark.errors import CheckpointError, RequestError
from dspark.text.files import special_tokens
from dspark.text.messages import check_messages, plain, without_nulls

_THE_RENDERERS = (
    "chat_template",
    "continue_final_message",
    "max_length",
    "padding",
    "sanitize_control_tokens",
    "tokenize",
    "tokenizer_kwargs",
    "truncation",
)
"""Keywords that transformers' `apply_chat_template` keeps for itself, as it does `return_...`: no template
reads these."""


@dataclass(frozen=True, slots=True)
class _Compiled:
    template: Template
    reads_tools: bool


class ChatTemplates:
    """The chat templates of one checkpoint, by name; usually one, called `default`."""

    def __init__(self, sources: Mapping[str, str], variables: Mapping[str, Any], origin: str) -> None:
        """`sources`: name to jinja2 text; `variables`: `bos_token`, say; `origin`: named in errors."""
        self._sources = dict(sources)
        self._variables = dict(variables)
        self._origin = origin
        self._environment = _environment()
        self._compiled: dict[str, _Compiled] = {}

    @classmethod
    def from_directory(cls, directory: Path, settings: dict[str, Any]) -> ChatTemplates:
        """Templates of `chat_template.jinja` and `additional_chat_templates/`, else those in `settings`."""
        sources = _listed(settings.get("chat_template"), directory / "tokenizer_config.json")
        files = {
            path.stem: path for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))
        }
        if (directory / "chat_template.jinja").is_file():
            files["default"] = directory / "chat_template.jinja"
        if files:  # files take the place of the settings' templates, as in transformers
            sources = {name: _read(path) for name, path in files.items()}
        return cls(sources, special_tokens(settings), str(directory))

    @property
    def is_empty(self) -> bool:
        """Whether the checkpoint has no template at all."""
        return not self._sources

    def with_options(self, options: Mapping[str, Any]) -> ChatTemplates:
        """The same templates with these defaults for their own keywords, which those of `render` override;
        RequestError if there are options but no template."""
        if options and self.is_empty:
            raise RequestError(f"{self._origin} has no chat template to give {', '.join(options)} to")
        _check_variables(options)
        return ChatTemplates(self._sources, {**self._variables, **options}, self._origin)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The text of a chat, ready for the assistant's answer (`add_generation_prompt=True` unless given).

        `variables` are the template's own keywords (`enable_thinking=False`); those it does not read have no
        effect, those of transformers' renderer are refused. RequestError without a template, on malformed
        messages, on tools that the template does not read, and on anything that the template refuses.
        """
        source = self._choose(tools)
        check_messages(messages)
        _check_variables(variables)
        try:
            compiled = self._compile(source)
            if tools and not compiled.reads_tools:
                raise RequestError(f"the chat template of {self._origin} has no place for tools")
            asked = {"messages": without_nulls(messages), "tools": list(tools) if tools else None}
            defaults = {"documents": None, "add_generation_prompt": True}
            return compiled.template.render({**defaults, **self._variables, **variables, **plain(asked)})
        except RequestError:
            raise
        except TemplateError as error:
            raise RequestError(f"the chat template of {self._origin} refuses this chat: {error}") from error
        except Exception as error:  # whatever the template's own expressions raise on this input
            raise RequestError(
                f"the chat template of {self._origin} fails on this chat: {type(error).__name__}: {error}"
            ) from error

    def _compile(self, source: str) -> _Compiled:
        # Compiled once: rendering a chat takes a fraction of the time.
        if source not in self._compiled:
            variables = meta.find_undeclared_variables(self._environment.parse(source))
            template = self._environment.from_string(source)
            self._compiled[source] = _Compiled(template, "tools" in variables)
        return self._compiled[source]

    def _choose(self, tools: object) -> str:
        if tools and "tool_use" in self._sources:
            return self._sources["tool_use"]
        if "default" in self._sources:
            return self._sources["default"]
        if self._sources:
            raise RequestError(
                f"{self._origin} has the chat templates {sorted(self._sources)}, but no default one"
            )
        raise RequestError(f"{self._origin} has no chat template; give a plain prompt instead")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read as a chat template: {error}") from error


def _listed(value: object, path: Path) -> dict[str, str]:
    """The `chat_template` entry: nothing, one text, or a list of named ones."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in value}  # type: ignore[attr-defined]
    except (TypeError, KeyError) as error:
        raise CheckpointError(
            f"{path}: chat_template must be a string or a list of named templates"
        ) from error


def _check_variables(variables: Mapping[str, Any]) -> None:
    for name in variables:
        if name in _THE_RENDERERS or name.startswith("return_"):
            raise RequestError(
                f"{name} is a keyword of transformers' renderer, not of a chat template; dspark only renders "
                "whole chats to token ids"
            )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationMark]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationMark(Extension):
    """`{% generation %}...{% endgeneration %}` marks words to train on; what is inside is rendered."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
