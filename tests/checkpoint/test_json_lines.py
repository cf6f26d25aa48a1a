"""Files of JSON lines, of prompts and of conversations: what ends a line, and what is no text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dspark.errors import CheckpointError, DSparkError, RequestError
from dspark.prompts import read_turns
from dspark.train.data.read import read_conversations

ENDS = "\u2028 \u2029 \x85 \x0b \x0c \x1c \x1d \x1e"
"""What `str.splitlines` takes for the end of a line beside "\\n" and "\\r"."""


def conversations(file: Path) -> list[list[int]]:
    return [one.tokens.tolist() for one in read_conversations([file], None, 512)]


def test_characters_that_end_lines_elsewhere_may_stand_in_texts(tmp_path: Path) -> None:
    assert len(f"a{ENDS}b".splitlines()) == 9
    file = tmp_path / "some.jsonl"
    file.write_bytes(f'{{"prompt": "a{ENDS}b"}}\r\n\n{{"turns": ["c\u2028", "d"]}}'.encode())
    assert read_turns(file) == [(f"a{ENDS}b",), ("c\u2028", "d")]
    entry = {"token_ids": [1, 2, 3], "answer_start": 1, "of": ENDS}
    file.write_text(json.dumps(entry, ensure_ascii=False) + "\n" + json.dumps(entry).replace("3", "4"))
    assert conversations(file) == [[1, 2, 3], [1, 2, 4]]
    file.write_text(file.read_text().replace("\\u000b", "\x0b"))
    assert conversations(file) == [[1, 2, 3], [1, 2, 4]]


READERS = [
    (read_turns, RequestError, "some.jsonl, line 2"),
    (conversations, CheckpointError, "jsonl: line 2"),
]


@pytest.mark.parametrize(("read", "kind", "named"), READERS)
def test_lines_are_counted_as_editors_do(
    tmp_path: Path, read: Callable[[Path], object], kind: type[DSparkError], named: str
) -> None:
    file = tmp_path / "some.jsonl"
    first = {"prompt": "a\u2028b\x85c", "token_ids": [1, 2], "answer_start": 1}
    file.write_text(json.dumps(first, ensure_ascii=False) + "\n{")
    with pytest.raises(kind, match=named):
        read(file)


@pytest.mark.parametrize(("read", "kind"), [reader[:2] for reader in READERS])
def test_what_is_no_text_is_named(
    tmp_path: Path, read: Callable[[Path], object], kind: type[DSparkError]
) -> None:
    file = tmp_path / "some.jsonl"
    file.write_bytes(b'{"prompt": "caf\xe9"}\n')
    with pytest.raises(kind, match=r"some\.jsonl.* cannot be read") as refused:
        read(file)
    assert "\n" not in str(refused.value)
