"""Loading a target that only transformers knows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dspark.checkpoint.config_file import ConfigFile
from dspark.checkpoint.load import resolve_dtype
from dspark.checkpoint.weights import WeightFiles
from dspark.errors import CheckpointError, first_line
from dspark.target.adapter.config import AdaptedConfig
from dspark.target.adapter.model import TransformersTarget
from dspark.target.adapter.names import require_causal
from dspark.target.adapter.probe import probe, refuse_recurrent
from dspark.target.adapter.stored import require_every_weight, require_floats

if TYPE_CHECKING:
    from dspark.checkpoint.load import Progress


def load_adapted(
    directory: Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype | str,
    progress: Progress | None,
) -> TransformersTarget:
    """See `load_target`. Progress is reported once, at the end: transformers reads all files in one call.

    Raises:
        CheckpointError: transformers does not know the architecture or cannot load it, or a weight is
            missing or quantised.
        ConfigError: the model cannot be rolled back, or cannot be a target for another reason that is named.
    """
    import transformers

    file = ConfigFile.read(directory / "config.json")
    architecture = require_causal(file)
    weights = WeightFiles.open(directory)
    element = resolve_dtype(dtype, weights, {name: name for name in weights.tensors})
    model = _load(transformers, weights, architecture, element).to(device).eval().requires_grad_(False)
    text = model.config.get_text_config(decoder=True)
    refuse_recurrent(model, text)
    config = AdaptedConfig.of_text(text, architecture)
    # Without a config, every layer of this cache keeps every position.
    target = TransformersTarget(model, config, transformers.DynamicCache, transformers.__version__)
    probe(target, text)
    if progress is not None:
        total = sum(stored.stop - stored.start for stored in weights.tensors.values())
        progress(total, total)
    return target.eval()


def _load(transformers: Any, weights: WeightFiles, architecture: str, dtype: torch.dtype) -> Any:
    try:
        with _quiet(transformers):
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                weights.directory,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, by name
                dtype=dtype,
            )
    except MemoryError:
        raise
    except Exception as error:  # transformers lets any exception of a bad checkpoint through
        raise CheckpointError(
            f"{weights.directory}: transformers {transformers.__version__} cannot load this {architecture} "
            f"({type(error).__name__}: {first_line(error)})"
        ) from error
    require_every_weight(weights, model, info)
    require_floats(weights, model, info)
    return model


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Silences transformers' own progress bar and warnings: what matters is raised."""
    logging = transformers.utils.logging
    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()
