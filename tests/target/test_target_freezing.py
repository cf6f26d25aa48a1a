"""What is in memory while a target's weights are fused."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import gemma4_zoo
import model_zoo
from dspark.layers import frozen
from dspark.layers.linear import FusedLinear
from dspark.target import load_target
from hybrid_zoo import write_hybrid

TARGETS: dict[str, Callable[[Path], Path]] = {
    "dense": lambda path: model_zoo.write_target(path, "qwen2"),
    "hybrid": write_hybrid,
    "gemma4": gemma4_zoo.write_target,
}
MOST_OF_A_LAYER = 8
"""Products of a hybrid's linear layer; others have 7 or fewer."""


@pytest.mark.parametrize("kind", TARGETS)
def test_freezing_never_holds_the_model_twice(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what has been fused, the separate weights of one layer at most are still there."""
    fused: list[weakref.ref[Tensor]] = []
    left: list[int] = []
    make = FusedLinear.__init__

    def watched(self: FusedLinear, linears: Sequence[nn.Linear], *args: Any, **options: Any) -> None:
        left.append(sum(weight() is not None for weight in fused))
        fused.extend(weakref.ref(linear.weight) for linear in linears)
        make(self, linears, *args, **options)

    monkeypatch.setattr(FusedLinear, "__init__", watched)
    load_target(TARGETS[kind](tmp_path))
    assert len(fused) > 2 * MOST_OF_A_LAYER and max(left) <= MOST_OF_A_LAYER


def test_a_dense_target_is_read_layer_by_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer when the one before it is fused: on a GPU that one's memory is there to be used again."""
    unread: list[bool] = []

    class Watched(frozen.FrozenLayer):
        __slots__ = ()

        def __init__(self, layer: Any, *args: Any) -> None:
            unread.append(layer.self_attn.q_proj.weight.is_meta and layer.mlp.down_proj.weight.is_meta)
            super().__init__(layer, *args)

    monkeypatch.setattr(frozen, "FrozenLayer", Watched)
    load_target(model_zoo.write_target(tmp_path, "llama"))
    assert len(unread) > 1 and all(unread)
