"""Which checkpoints are left to transformers."""

from __future__ import annotations

from importlib.util import find_spec

from dspark.checkpoint.config_file import ConfigFile
from dspark.errors import CheckpointError

REQUIREMENT = "transformers>=5.0"


def is_importable() -> bool:
    """Whether transformers is installed; does not import it."""
    return find_spec("transformers") is not None


def require_causal(config: ConfigFile) -> str:
    """The architecture, if transformers knows it as a causal model of this config's `model_type`.

    Raises:
        CheckpointError: it does not, or the checkpoint needs code of its own or is quantised.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from dspark.target.families import unsupported

    seen, model_type = config.architectures(), config.raw("model_type")
    config.refuse_quantised()
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    names = (known,) if isinstance(known, str) else tuple(known or ())
    if len(seen) != 1 or seen[0] not in names:
        theirs = f"a {' or '.join(names)}" if names else "unknown"
        own = "; code that comes with a checkpoint is not run" if config.raw("auto_map") is not None else ""
        raise CheckpointError(
            f"{unsupported(config)}, and causal models of transformers, where model_type {model_type!r} is "
            f"{theirs}{own}"
        )
    return seen[0]
