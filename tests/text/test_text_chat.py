"""Chat templates: the model sees what transformers would show it, and all else is refused by name."""

from __future__ import annotations

import json
import shutil
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dspark.errors import CheckpointError, RequestError
from dspark.text import Tokenizer
from places import TINY

TARGET = TINY / "target"
MESSAGES = [
    {"role": "system", "content": "Answer <briefly> & well."},
    {"role": "user", "content": "Who's there?\n"},
    {"role": "assistant", "content": "Nobody."},
    {"role": "user", "content": [{"type": "text", "text": "And now?"}]},
]
CALLED = [
    *MESSAGES,
    {"role": "assistant", "content": None, "tool_calls": [{"name": "look", "arguments": {"at": None}}]},
    {"role": "tool", "content": "nobody", "tool_calls": None},
]
"""With nulls, as clients made for other servers send them."""
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {"é": {}}}},
    }
]
MASK = {"__type": "AddedToken", "content": "<|mask|>", "special": True}  # as newer files store it
# What templates in the wild use, in one: block trimming, loop controls, namespaces, tojson with options,
# generation marks, special tokens, tools, keywords, macros, string methods.
RICH = """{{ bos_token }}{% if tools is not none and tools %}
    {%- for tool in tools %}{{ tool | tojson(indent=2) }}{% endfor %}
{% endif %}
{% macro part(content) %}
    {%- if content is string %}{{ content }}{% else %}
        {%- for p in content %}{{ p.text }}{% endfor %}{% endif %}
{% endmacro %}
{% set state = namespace(turns=0) %}
{% for message in messages %}
    {% if message.role == 'system' %}
        {{- '[' + message['content'].strip() + ']' }}
        {% continue %}
    {% endif %}
    {% if state.turns > 7 %}{% break %}{% endif %}
    {% set state.turns = state.turns + 1 %}
{{ '<' + message.role + '>' }}
{% generation %}{{ part(message.content) }}{% endgeneration %}{{ eos_token }}
{% if "tool_calls" in message %}{{ message.tool_calls | length }}{{ message.tool_calls | tojson }}{% endif %}
{% endfor %}
{{ {'turns': state.turns, 'html': '<&>'} | tojson }}
{% if add_generation_prompt %}
{{ '<assistant>' }}{% if not (enable_thinking | default(true)) %}{{ '<think></think>' }}{% endif %}
{% endif %}
"""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    shutil.copy(TARGET / "tokenizer.json", tmp_path)
    return tmp_path


def configure(directory: Path, **settings: Any) -> Tokenizer:
    named = {"bos_token": "<|endoftext|>", "eos_token": MASK}
    (directory / "tokenizer_config.json").write_text(json.dumps(named | settings))
    return Tokenizer.from_directory(directory)


def text_of(tokenizer: Tokenizer, *args: Any, **kwargs: Any) -> str:
    return tokenizer.decode(tokenizer.render_chat(*args, **kwargs), skip_special_tokens=False)


@pytest.mark.parametrize("messages", [MESSAGES, CALLED], ids=["plain", "nulls"])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}, {"add_generation_prompt": False}])
def test_a_chat_is_laid_out_as_by_transformers(
    checkpoint: Path,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    variables: dict[str, bool],
) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = configure(checkpoint, chat_template=RICH, tokenizer_class="PreTrainedTokenizerFast")
    theirs = PreTrainedTokenizerFast.from_pretrained(checkpoint).apply_chat_template(
        messages, tools=tools, tokenize=False, **({"add_generation_prompt": True} | variables)
    )
    assert text_of(tokenizer, messages, tools, **variables) == theirs
    assert "[Answer <briefly> & well.]" in theirs  # and the comparison saw a real chat


def test_a_message_may_be_any_mapping(checkpoint: Path) -> None:
    tokenizer = configure(
        checkpoint, chat_template="{{ messages[0].content }}{{ messages[0].calls | tojson }}"
    )
    message = {"role": "assistant", "content": None, "calls": [MappingProxyType({"name": "look"})]}
    assert text_of(tokenizer, [MappingProxyType(message)]) == '[{"name": "look"}]'
    assert message["content"] is None


def test_documents_are_none_unless_given(checkpoint: Path) -> None:
    template = "{{ documents is none }}{% if documents %}{{ documents | length }}{% endif %}"
    tokenizer = configure(checkpoint, chat_template=template)
    assert text_of(tokenizer, MESSAGES) == "True"
    assert text_of(tokenizer, MESSAGES, documents=[{"title": "a", "text": "b"}]) == "False1"


@pytest.mark.parametrize("name", ["continue_final_message", "tokenize", "max_length", "return_dict"])
def test_keywords_of_another_renderer_are_refused(checkpoint: Path, name: str) -> None:
    tokenizer = configure(checkpoint, chat_template="plain")
    with pytest.raises(RequestError, match=f"^{name} is a keyword of transformers' renderer"):
        tokenizer.render_chat(MESSAGES, **{name: True})  # type: ignore[arg-type]


def test_a_template_is_compiled_once(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    compile_ = ImmutableSandboxedEnvironment.from_string

    def count(self: Any, source: str, *args: Any) -> Any:
        compiled.append(source)
        return compile_(self, source, *args)

    monkeypatch.setattr(ImmutableSandboxedEnvironment, "from_string", count)
    template = "{{ messages | length }}{% for tool in tools or [] %}{{ tool.type }}{% endfor %}"
    tokenizer = configure(checkpoint, chat_template=template)
    texts = [text_of(tokenizer, MESSAGES[:many], tools) for many in (1, 2) for tools in (None, TOOLS)]
    assert texts == ["1", "1function", "2", "2function"] and compiled == [template]


def test_the_templates_special_tokens_are_single_ids_and_not_doubled(checkpoint: Path) -> None:
    tokenizer = configure(
        checkpoint, chat_template="{{ bos_token }}{{ messages[0].content }}", add_bos_token=True
    )
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}])[:1] == [0]
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]).count(0) == 1
    assert tokenizer.encode("hi").count(0) == 1


def test_the_date_is_todays(checkpoint: Path) -> None:
    tokenizer = configure(checkpoint, chat_template="{{ strftime_now('%Y') }}")
    assert text_of(tokenizer, MESSAGES) in (str(datetime.now().year), str(datetime.now().year - 1))


def test_a_template_file_takes_the_place_of_the_settings(checkpoint: Path) -> None:
    (checkpoint / "chat_template.jinja").write_text("from the file", encoding="utf-8")
    assert text_of(configure(checkpoint, chat_template="from the settings"), MESSAGES) == "from the file"


def test_named_templates(checkpoint: Path) -> None:
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools | length }} tools"},
    ]
    tokenizer = configure(checkpoint, chat_template=named)
    assert text_of(tokenizer, MESSAGES) == "plain"
    assert text_of(tokenizer, MESSAGES, TOOLS) == "1 tools"
    with pytest.raises(RequestError, match="no default"):
        configure(checkpoint, chat_template=named[1:]).render_chat(MESSAGES)


def test_additional_template_files(checkpoint: Path) -> None:
    (checkpoint / "additional_chat_templates").mkdir()
    (checkpoint / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools | length }} tools")
    (checkpoint / "chat_template.jinja").write_text("plain")
    tokenizer = configure(checkpoint)
    assert text_of(tokenizer, MESSAGES) == "plain"
    assert text_of(tokenizer, MESSAGES, TOOLS) == "1 tools"


def test_no_template_is_a_request_error() -> None:
    with pytest.raises(RequestError, match="no chat template"):
        Tokenizer.from_directory(TARGET).render_chat(MESSAGES)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages[0].nothing.at_all }}", "nothing"),
        ("{{ 'a' + 1 }}", "TypeError"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "Range too big"),
    ],
)
def test_what_goes_wrong_in_a_template_is_a_request_error(checkpoint: Path, template: str, said: str) -> None:
    tokenizer = configure(checkpoint, chat_template=template)
    with pytest.raises(RequestError, match=said):
        tokenizer.render_chat(MESSAGES)


def test_tools_that_the_template_would_drop_are_refused(checkpoint: Path) -> None:
    tokenizer = configure(checkpoint, chat_template="{{ messages[0].content }}")
    with pytest.raises(RequestError, match="no place for tools"):
        tokenizer.render_chat(MESSAGES, TOOLS)
    assert tokenizer.render_chat(MESSAGES, []) == tokenizer.render_chat(MESSAGES)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "at least one message"),
        ("hello", "a chat is a list"),
        ({"role": "user", "content": "x"}, "a chat is a list"),
        (["hello"], "message 0"),
        ([{"content": "x"}], "message 0"),
        (
            [MESSAGES[0], {"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
            "message 1.*image_url",
        ),
        ([{"role": "user", "content": object()}], "not JSON serializable"),
    ],
)
def test_malformed_chats_are_refused_by_name(checkpoint: Path, messages: Any, said: str) -> None:
    tokenizer = configure(checkpoint, chat_template="x")
    with pytest.raises(RequestError, match=said):
        tokenizer.render_chat(messages)


def test_a_strange_template_entry_is_a_checkpoint_error(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match="chat_template"):
        configure(checkpoint, chat_template=[1, 2])


def test_the_callers_messages_are_left_alone(checkpoint: Path) -> None:
    tokenizer = configure(checkpoint, chat_template="{% set _ = messages[0].update({'role': 'x'}) %}")
    messages = json.loads(json.dumps(MESSAGES))
    with pytest.raises(RequestError):
        tokenizer.render_chat(messages)
    assert messages == MESSAGES


def test_a_template_that_is_no_text_is_named(checkpoint: Path) -> None:
    (checkpoint / "chat_template.jinja").write_bytes(b"\xff\xfe{{")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja cannot be read as a chat template"):
        configure(checkpoint)


@pytest.mark.parametrize("message", ["x" * 100_000, 10**5000], ids=["text", "number"])
def test_what_is_no_message_is_shown_in_short(checkpoint: Path, message: object) -> None:
    tokenizer = configure(checkpoint, chat_template="plain")
    with pytest.raises(RequestError, match=r"message 0 is .*expected a dict with a role") as raised:
        tokenizer.render_chat([message])  # type: ignore[list-item]
    assert len(str(raised.value)) < 400
