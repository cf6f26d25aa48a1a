"""The byte-level BPE tokenizer inside a GGUF file, rebuilt as `tokenizer.json` and its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dspark.errors import CheckpointError
from dspark.pretrained.gguf_weights import field

if TYPE_CHECKING:
    from gguf import GGUFReader

_CONTROL = 3  # GGUF's token type of special tokens
_USER_DEFINED = 4


def build_tokenizer(reader: GGUFReader) -> Tokenizer:
    """The tokenizer of a GGUF file of kind `gpt2` with pre-tokenizer `smollm`; others are refused."""
    kind, pre = field(reader, "tokenizer.ggml.model"), field(reader, "tokenizer.ggml.pre")
    if (kind, pre) != ("gpt2", "smollm"):
        raise CheckpointError(f"the GGUF file's tokenizer is {kind}/{pre}; only gpt2/smollm can be converted")
    tokens: list[str] = field(reader, "tokenizer.ggml.tokens")
    types: list[int] = field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(line.split(" ")) for line in field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    # Digits are split off *before* the usual split, so "\n\n1." is `ĊĊ`, `1`, `.`. Without that step it is
    # `Ċ`, `Ċ`, `1`, `.`, a form that the model never saw in training.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = [
        AddedToken(token, special=kind_of == _CONTROL, normalized=False)
        for token, kind_of in zip(tokens, types, strict=True)
        if kind_of in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    return tokenizer


def tokenizer_config(reader: GGUFReader) -> dict[str, Any]:
    """`tokenizer_config.json`: the special tokens' roles and the chat template."""
    tokens: list[str] = field(reader, "tokenizer.ggml.tokens")
    named = {
        "bos_token": "tokenizer.ggml.bos_token_id",
        "eos_token": "tokenizer.ggml.eos_token_id",
        "pad_token": "tokenizer.ggml.padding_token_id",
        "unk_token": "tokenizer.ggml.unknown_token_id",
    }
    return {
        **{name: tokens[field(reader, key)] for name, key in named.items()},
        "add_bos_token": field(reader, "tokenizer.ggml.add_bos_token", False),
        "add_prefix_space": False,
        "chat_template": field(reader, "tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": field(reader, "llama.context_length"),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
