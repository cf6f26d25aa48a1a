"""A benchmark's prompts as token ids, each with room for what is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dspark.errors import CapacityError

if TYPE_CHECKING:
    from dspark.serve.models import Models


def check_room(sets: Mapping[str, Sequence[Sequence[int]]], window: int, tokens: int) -> None:
    """Checks that every prompt leaves room for `tokens` tokens in the context window.

    Raises:
        CapacityError: names a prompt that does not.
    """
    for name, prompts in sets.items():
        for number, prompt in enumerate(prompts, 1):
            if len(prompt) + tokens > window:
                raise CapacityError(
                    f"prompt set {name}, prompt {number} has {len(prompt)} tokens, which leaves no room for "
                    f"{tokens} more in the context window of {window}"
                )


def tokenised(
    texts: list[str], models: Models, template: Mapping[str, Any], *, is_code: bool
) -> list[list[int]]:
    """Token ids: as a user's message where the target has a chat template, which is given the keywords in
    `template`, else the text as it is.

    Beginnings of program text are to be continued, not answered, so they get no template.
    """
    tokenizer = models.require_tokenizer().with_template_options(template)
    asked = (text if is_code else tokenizer.encode_prompt(text) for text in texts)
    return [list(models.tokens(prompt)) for prompt in asked]
