"""The real SmolLM2, fetched and converted if it is not in the cache yet: it has to speak, and to count."""

from __future__ import annotations

import pytest

from dspark.pretrained import resolve
from dspark.text import Tokenizer

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

STORY = (
    "The old lighthouse stood on a cliff above the sea. Every evening the keeper climbed the stairs, lit "
    "the lamp, and watched the ships pass on their way to the harbour. In winter the wind was so strong "
    "that he had to hold on to the railing, but he never missed a night. One day a letter arrived from "
    "the city. It said that the lamp would be replaced by a machine that needed nobody to tend it. The "
    "keeper read the letter twice, folded it, and put it in his pocket. Then he went up the stairs as "
    "usual, because it was getting dark and somebody had to light the lamp."
)


def test_the_loss_on_english_text_is_that_of_the_model() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    directory = resolve("smollm2", "target")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    assert model.dtype == torch.float32
    ids = torch.tensor([Tokenizer.from_directory(directory).encode(STORY)])
    with torch.inference_mode():
        loss = model(ids, labels=ids).loss.item()
    assert 2.5 < loss < 2.9  # 2.69; with q and k rows left in GGUF's order 4.40


def test_the_tokenizer_splits_digits_and_knows_the_chat() -> None:
    tokenizer = Tokenizer.from_directory(resolve("smollm2", "target"))
    assert [tokenizer.decode([i]) for i in tokenizer.encode("\n\n1. 2024")] == [
        "\n\n",
        "1",
        ".",
        " ",
        *"2024",
    ]
    chat = tokenizer.render_chat([{"role": "user", "content": "Hello"}])
    assert tokenizer.decode(chat, skip_special_tokens=False).endswith(
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.eos_token_ids == (2,)
    assert chat[0] == 1
