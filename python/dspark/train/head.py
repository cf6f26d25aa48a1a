"""The target's embeddings and output head as frozen parameters of a draft in training."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from dspark.checkpoint.load import read_tensor
from dspark.draft.export.borrowed import EMBEDDINGS, HEAD, borrowed_tensors


def embeddings_and_head(
    target: Path, shape: tuple[int, int], target_ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Embeddings `[vocabulary, hidden]` and the head's rows `[draft vocabulary, hidden]`, f32.

    `shape` is (vocabulary, hidden), `target_ids` the tokens of a reduced vocabulary. A loaded target cannot
    give them: its head is packed for inference, and autograd does not go through that.
    """
    stored = borrowed_tensors(target, shape)
    embeddings = read_tensor(stored[EMBEDDINGS]).float()
    same = stored[HEAD] == stored[EMBEDDINGS]
    head = embeddings if same else read_tensor(stored[HEAD]).float()
    return embeddings, head.clone() if target_ids is None else head.index_select(0, target_ids)


def teacher_logits(hidden: Tensor, head: Tensor) -> Tensor:
    """The target's logits `[rows, draft vocabulary]` of normed hidden states, without gradients.

    In the head's own precision, also under autocast: bfloat16 logits around 20 are 0.06 off.
    """
    with torch.no_grad(), torch.autocast(head.device.type, enabled=False):
        return hidden.to(head.dtype) @ head.T
