"""The published flagship's drafts, made from the facts in data/flagship.json: configs, shapes, files.

As a program it loads one and prints what that took: `python flagship.py DIRECTORY`.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from places import DATA

FACTS = json.loads((DATA / "flagship.json").read_text())
SWITCHES = (
    "mask_token_id",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
)
SIZES = (
    "hidden_size",
    "head_dim",
    "num_key_value_heads",
    "vocab_size",
    "num_target_layers",
    "num_hidden_layers",
    "rms_norm_eps",
    "max_position_embeddings",
    "block_size",
    "architectures",
    "model_type",
)


def config(revision: str) -> dict[str, Any]:
    """config.json of a revision, in the nested packaging."""
    common, own = FACTS["draft_common"], FACTS[revision]
    return {
        **{key: common[key] for key in SIZES},
        "layer_types": ["full_attention"] * common["num_hidden_layers"],
        "num_attention_heads": own["num_attention_heads"],
        "intermediate_size": own["intermediate_size"],
        "rope_parameters": common["rope"],
        **({"training_block_size": own["training_block_size"]} if "training_block_size" in own else {}),
        "dflash_config": {
            "projector_type": "dspark",
            "target_layer_ids": own["target_layer_ids"],
            **{key: common[key] for key in SWITCHES},
        },
    }


def shapes(revision: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors: those listed for v2, and for v1 with its own heads and width."""
    first, second = FACTS[revision], FACTS["v2"]
    head = FACTS["draft_common"]["head_dim"]
    other = {
        second["num_attention_heads"] * head: first["num_attention_heads"] * head,
        second["intermediate_size"]: first["intermediate_size"],
    }
    found = {}
    for name, shape in FACTS["v2_tensors"].items():
        if ".mlp." in name or "q_proj" in name or "o_proj" in name:
            shape = [other.get(size, size) for size in shape]
        layers = range(FACTS["draft_common"]["num_hidden_layers"]) if ".N." in name else [0]
        found |= {name.replace(".N.", f".{layer}."): tuple(shape) for layer in layers}
    return found


def write(directory: Path, revision: str, pieces: Any = None) -> Path:
    """A checkpoint of bfloat16. Without `pieces` (name, bytes) -> bytes-likes it is a sparse file of
    zeros."""
    from dspark.checkpoint.write import NewTensor, write_safetensors

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config(revision)))
    file = directory / "model.safetensors"
    tensors = []
    for name, shape in shapes(revision).items():

        def content(name: str = name, shape: tuple[int, ...] = shape) -> Iterable[bytes]:
            return pieces(name, 2 * math.prod(shape))

        tensors.append(NewTensor(name, "BF16", shape, content))
    if pieces is not None:
        write_safetensors(file, tensors)
        return directory
    header, start = {}, 0
    for tensor in tensors:
        offsets = [start, start + tensor.size]
        header[tensor.name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": offsets}
        start = offsets[1]
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + start)
    return directory


def peak() -> int:
    """The most memory that this process has had resident, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def stand_in() -> Any:
    """A target that has nothing but embeddings and output head."""
    import torch

    from dspark.target.protocol import OwnTarget

    class StandIn(OwnTarget):
        """Embeddings and output head of the target's sizes, made when they are first needed."""

        class config:
            vocab_size = FACTS["target"]["vocab_size"]
            hidden_size = FACTS["target"]["hidden_size"]
            num_hidden_layers = FACTS["target"]["num_hidden_layers"]
            max_position_embeddings = FACTS["target"]["max_position_embeddings"]
            tie_word_embeddings = False

        device, dtype = torch.device("cpu"), torch.bfloat16
        weight: torch.Tensor | None = None

        def table(self) -> torch.Tensor:
            if self.weight is None:
                some = torch.randn(1024, self.config.hidden_size).to(torch.bfloat16)
                self.weight = some.repeat(-(-self.config.vocab_size // 1024), 1)[: self.config.vocab_size]
            return self.weight

        def embed(self, ids: torch.Tensor) -> torch.Tensor:
            return self.table()[ids]

        def project(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden @ self.table().T

    return StandIn()


def main(directory: Path) -> None:
    import torch

    torch.set_num_threads(1)
    before = peak()
    from dspark.draft import load_draft

    steps: list[tuple[int, int]] = []
    start = time.perf_counter()
    target = stand_in()
    draft = load_draft(directory, target=target, progress=lambda done, total: steps.append((done, total)))
    loaded = time.perf_counter() - start
    most = peak() - before
    context = draft.new_context()
    width = len(draft.config.target_layer_ids) * draft.config.target_hidden_size
    with torch.inference_mode():
        draft.extend([(context, 12)], torch.randn(12, width).to(torch.bfloat16))
        target.table()
        start = time.perf_counter()
        hidden, base = draft.block([17], [context])
    result = {
        "weights": steps[-1][1],
        "peak": most,
        "seconds": loaded,
        "steps": len(steps),
        "complete": steps[-1][0] == steps[-1][1] and steps == sorted(steps),
        "block_seconds": time.perf_counter() - start,
        "hidden": list(hidden.shape),
        "base": list(base.shape),
        "finite": bool(base.isfinite().all()) and bool(hidden.isfinite().all()),
        "packed": draft.dtype == torch.bfloat16,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
