"""The code that loads and describes each architecture. It is named here and imported when used, so this table
needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from dspark.checkpoint.config_file import ConfigFile
from dspark.errors import CheckpointError
from dspark.target.adapter import names as adapter_names

if TYPE_CHECKING:
    from dspark.checkpoint.weights import WeightFiles
    from dspark.target.protocol import TargetSizes


@dataclass(frozen=True, slots=True)
class Family:
    """Architectures that share their code.

    `loader` names a function `(directory, *, device, dtype, progress) -> Target`, `reader` one
    `(config) -> TargetSizes`, `describer` one `(config, weights) -> Description`; all as "module:function".
    """

    architectures: Mapping[str, tuple[str, ...]]
    """Each architecture with the `model_type`s by which it is known where `architectures` is missing."""
    loader: str
    reader: str
    describer: str

    def load(self, *args: Any, **options: Any) -> Any:
        """Calls the loader."""
        return _named(self.loader)(*args, **options)

    def read(self, config: ConfigFile) -> TargetSizes:
        """Calls the reader: the target's configuration, without its weights."""
        sizes: TargetSizes = _named(self.reader)(config)
        return sizes

    def describe(self, config: ConfigFile, weights: WeightFiles) -> Description:
        """Calls the describer."""
        description: Description = _named(self.describer)(config, weights)
        return description


@dataclass(frozen=True, slots=True)
class Description:
    """What `inspect` reports about a target."""

    facts: dict[str, Any]
    """Architecture and sizes, ready for JSON."""
    tensors: set[str]
    """Names of the stored tensors that the target uses."""
    ignored: dict[str, int] = field(default_factory=dict)
    """Tensors that are left out on purpose, counted by the start of their names."""
    notes: list[str] = field(default_factory=list)


FAMILIES = (
    Family(
        {
            "LlamaForCausalLM": ("llama",),
            "Qwen2ForCausalLM": ("qwen2",),
            "Qwen3ForCausalLM": ("qwen3",),
        },
        loader="dspark.target.dense:load_dense",
        reader="dspark.target.config:TargetConfig.from_file",
        describer="dspark.target.dense:describe_dense",
    ),
    Family(
        {
            "Qwen3_5ForCausalLM": ("qwen3_5_text",),
            "Qwen3_5ForConditionalGeneration": ("qwen3_5",),
        },
        loader="dspark.target.hybrid.load:load_hybrid",
        reader="dspark.target.hybrid.config:HybridConfig.from_file",
        describer="dspark.target.hybrid.describe:describe_hybrid",
    ),
    Family(
        {
            "Gemma4UnifiedForCausalLM": ("gemma4_unified_text",),
            "Gemma4UnifiedForConditionalGeneration": ("gemma4_unified",),
            "Gemma4ForCausalLM": ("gemma4_text",),
            "Gemma4ForConditionalGeneration": ("gemma4",),
        },
        loader="dspark.target.gemma4.load:load_gemma4",
        reader="dspark.target.gemma4.load:read_gemma4",
        describer="dspark.target.gemma4.load:describe_gemma4",
    ),
)

ADAPTER = Family(
    {},
    loader="dspark.target.adapter.load:load_adapted",
    reader="dspark.target.adapter.describe:read_adapted",
    describer="dspark.target.adapter.describe:describe_adapted",
)
"""Loads the architectures that no other family loads, where transformers is installed and knows them."""


def supported_architectures() -> list[str]:
    """Every architecture that some family loads."""
    return [name for family in FAMILIES for name in family.architectures]


def find_family(config: ConfigFile) -> Family | None:
    """The family of a target's config: by `architectures`, or by `model_type` where that is missing."""
    seen = config.architectures()
    for family in FAMILIES:
        if len(seen) == 1 and seen[0] in family.architectures:
            return family
        if not seen and any(config.raw("model_type") in types for types in family.architectures.values()):
            return family
    return None


def family_of(config: ConfigFile) -> Family:
    """The family that loads a target's config: one of ours, or the adapter to transformers.

    Raises:
        CheckpointError: nothing loads this architecture; what was seen is named.
    """
    family = find_family(config)
    if family is not None:
        return family
    if len(config.architectures()) != 1:
        raise CheckpointError(unsupported(config))
    if not adapter_names.is_importable():
        raise CheckpointError(
            f"{unsupported(config)}; other causal models run through transformers, which is not installed: "
            f"pip install '{adapter_names.REQUIREMENT}'"
        )
    return ADAPTER


def unsupported(config: ConfigFile) -> str:
    """The error message for an architecture that no family of ours loads."""
    seen = config.architectures()
    found = ", ".join(seen) if seen else f"none, model_type {config.raw('model_type')!r}"
    return (
        f"{config.path}: architectures is {found}; supported targets are "
        f"{', '.join(supported_architectures())}"
    )


def architecture_of(config: ConfigFile, family: Family) -> str:
    """The architecture that `config` names or its `model_type` implies."""
    seen = config.architectures()
    if seen:
        return seen[0]
    model_type = config.raw("model_type")
    return next(name for name, types in family.architectures.items() if model_type in types)


def _named(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return attrgetter(attribute)(import_module(module))
