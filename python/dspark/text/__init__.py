"""Text and tokens: the checkpoint's tokenizer, its chat template, and text that streams whole characters."""

from dspark.text.files import eos_token_ids
from dspark.text.stream import TextStream
from dspark.text.tokenizer import Tokenizer

__all__ = ["TextStream", "Tokenizer", "eos_token_ids"]
