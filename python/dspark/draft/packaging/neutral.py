"""Switches that make a draft compute something that is not implemented here.

Such a draft would load, but its tokens would hardly ever be accepted: the text would still be right, and
nothing would say why decoding is slow. So each switch must be absent or have the value that changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dspark.checkpoint.config_file import ConfigFile, shortened
from dspark.draft.packaging.switches import Switches
from dspark.errors import CheckpointError

NEUTRAL: dict[str, tuple[bool | float | str, str]] = {
    "attention_sink_bias": (False, "attention with sinks"),
    "add_swa_attention_sink_bias": (False, "attention with sinks"),
    "add_full_attention_sink_bias": (False, "attention with sinks"),
    "attention_value_scale": (1.0, "a factor on the values of attention"),
    "is_neox_style": (True, "a rotation of neighbouring entries"),
    "rope_is_neox_style": (True, "a rotation of neighbouring entries"),
    "output_multiplier": (1.0, "a factor on the output"),
    "input_embedding_scale": (1.0, "a factor on the embeddings"),
    "log_snr_conditioning": (False, "conditioning on a level of noise"),
    "dflash_query_causal": (False, "a block of causal queries"),
    "conv_kernel_size": (0, "DFlash 2's convolution"),
    "selector_rank": (0, "DFlash 2's selector of candidates"),
    "logit_scale": (1.0, "a factor on the logits"),
    "conditioning_source": ("hidden", "a context from anything but hidden states"),
    "use_aux_hidden_state": (True, "a context from anything but tapped layers"),
    "fc_layernorm": (False, "a norm of every tap"),
}
"""The neutral value of each switch, and what any other value means."""


def refuse_other_arithmetic(parts: Iterable[ConfigFile]) -> None:
    """
    Args:
        parts: the config, and its part about the layers where that is separate.

    Raises:
        CheckpointError: a switch with another value than its neutral one.
    """
    for part in parts:
        switches = Switches(part)
        for key, (neutral, meaning) in NEUTRAL.items():
            for place, value in switches.places(key):
                if value is not None and not _equal(value, neutral):
                    raise CheckpointError(
                        f"{part.path}: {part.prefix}{place} is {shortened(value)}, expected {neutral!r} or "
                        f"nothing; {meaning} is not supported"
                    )


def _equal(value: Any, neutral: bool | float | str) -> bool:
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)
