"""The two pairs that are measured, and prompts for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dspark import DSparkDecoder, SamplingParams

ROOT = Path(__file__).resolve().parent.parent

CODE = (
    "def read(self, size):\n",
    "import os\n\nclass Reader:\n    def __init__(self, path):\n",
    "    def __iter__(self):\n        for ",
    "def parse(line):\n    if not line:\n        return None\n",
    "class Error(Exception):\n    ",
    "    with open(path) as file:\n        ",
    "try:\n    import json\nexcept ImportError:\n",
    "def main(args):\n    parser = ",
)
CHAT = (
    "Explain why the sky is blue, in three short paragraphs.",
    "Write a polite e-mail that moves a meeting from Monday to Wednesday.",
    "What are the main differences between a library and a framework?",
    "Give me five ideas for a rainy Sunday with two children.",
    "A train leaves at 9:40 and arrives at 13:05. How long is the journey? Show the steps.",
    "Summarise the water cycle for a ten-year-old.",
    "Write a Python function that reverses the words of a sentence.",
    "Why do we have leap years?",
)


@dataclass(frozen=True)
class Pair:
    """A target with its draft, and how it is prompted."""

    target: str
    draft: str
    tokens: int
    chat: bool
    prompts: tuple[str, ...]
    block_size: int

    def ids(self, decoder: DSparkDecoder, index: int = 0) -> list[int]:
        """Token ids of one of the prompts."""
        prompt = self.prompts[index % len(self.prompts)]
        if self.chat:
            return decoder.render_chat([{"role": "user", "content": prompt}])
        return list(decoder.generate(prompt, SamplingParams(max_tokens=0)).prompt_token_ids)


PAIRS = {
    "tiny": Pair("tiny", "tiny-draft", 96, False, CODE, 4),
    "smollm2": Pair("smollm2", str(ROOT / "models" / "smollm2-draft"), 64, True, CHAT, 3),
}
