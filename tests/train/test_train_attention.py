"""FlexAttention, which training takes on a GPU, against the mask and the numbers of the other two ways."""

from __future__ import annotations

import shutil
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from dspark.train import attention
from dspark.train.attention import block_attention, kind_for, why_not_flex
from dspark.train.batch import Anchors


def some_anchors(batch: int, blocks: int, length: int) -> Anchors:
    """At random; the unused ones stand at 0, as `choose_anchors` leaves them."""
    kept = (torch.rand(batch, blocks) < 0.8).sort(1, descending=True).values
    positions = torch.randint(0, length, (batch, blocks)).sort(1).values
    return Anchors(torch.where(kept, positions, 0), kept)


def test_the_mask_of_flex_attention_is_that_of_the_others() -> None:
    torch.manual_seed(0)
    for batch, blocks, width, length in torch.randint(1, 9, (60, 4)).tolist():
        anchors = some_anchors(batch, blocks, length)
        rows = blocks * width
        b = torch.arange(batch)[:, None, None]
        row, key = torch.arange(rows)[:, None], torch.arange(length + rows)
        seen = attention._sees(anchors, length, width)(b, torch.tensor(0), row, key)
        assert torch.equal(seen, attention._visible(anchors, length, width))


def test_who_attends_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, found = torch.device("cuda", 0), {"gcc": "/usr/bin/gcc"}
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", found.get)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert kind_for(torch.device("cpu"), 256) == "products"
    assert kind_for(gpu, 256) == "flex"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (12, 0))
    assert kind_for(gpu, 128) == "flex" and kind_for(gpu, 256) == "sdpa"
    assert "heads of 256" in str(why_not_flex(gpu, 256))
    found.clear()
    assert kind_for(gpu, 128) == "sdpa" and "C compiler" in str(why_not_flex(gpu, 128))
    monkeypatch.setenv("CC", "cc")
    assert kind_for(gpu, 128) == "flex"


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("width", "blocks", "length"), [(4, 3, 20), (7, 30, 140)])
def test_flex_attention_gives_the_values_and_gradients_of_the_others(
    monkeypatch: pytest.MonkeyPatch, width: int, blocks: int, length: int
) -> None:
    """Not compiled, on a CPU, where torch has its backward too but for a check; more than one tile of 128."""
    module = sys.modules["torch.nn.attention.flex_attention"]
    monkeypatch.setattr(module, "_validate_device", lambda *_: None)
    monkeypatch.setattr(attention, "_compiled_flex", lambda: flex_attention)
    torch.manual_seed(3)
    batch, heads, kv, dim = 2, 4, 2, 8
    anchors, rows = some_anchors(batch, blocks, length), blocks * width
    shapes = ((rows, heads), (length, kv), (length, kv), (rows, kv), (rows, kv))
    given = [torch.randn(batch, *shape, dim) for shape in shapes]
    weights = torch.randn(batch, rows, heads * dim)

    def found(kind: str) -> list[Any]:
        inputs: list[Tensor] = [tensor.clone().requires_grad_() for tensor in given]
        out = block_attention(anchors, length, width, kind)(*inputs)
        (out * weights).sum().backward()
        return [out.detach(), *(tensor.grad for tensor in inputs)]

    for ours, theirs in zip(found("flex"), found("products"), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)
