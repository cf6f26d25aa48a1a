"""The target's embeddings and output head as frozen parameters of a draft in training."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from dspark.checkpoint.load import read_tensor
from dspark.draft import DSparkDraftModel
from dspark.draft.export.borrowed import borrowed_tensors
from dspark.draft.packaging.common import EMBEDDINGS, HEAD
from dspark.errors import ConfigError
from dspark.target.protocol import Target

CHECKED_ROWS = 16


def embeddings_and_head(
    target: Path, shape: tuple[int, int], target_ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Embeddings `[vocabulary, hidden]` and the head's rows `[draft vocabulary, hidden]`, f32.

    `shape` is (vocabulary, hidden), `target_ids` the tokens of a reduced vocabulary. The tensors come from
    the files, because a loaded target's head is packed for inference, and autograd does not go through that.
    """
    stored = borrowed_tensors(target, shape)
    embeddings = read_tensor(stored[EMBEDDINGS]).float()
    same = stored[HEAD] == stored[EMBEDDINGS]
    head = embeddings if same else read_tensor(stored[HEAD]).float()
    return embeddings, head.clone() if target_ids is None else head.index_select(0, target_ids)


def check_head(target: Target, path: Path) -> None:
    """Checks that the head stored in `path` turns the target's last states into the target's own logits.

    Raises:
        ConfigError: it does not: the target scales its logits, or adds a bias.
    """
    shape = target.config.vocab_size, target.config.hidden_size
    head = embeddings_and_head(path, shape, None)[1].to(target.device)
    ids = torch.linspace(0, shape[0] - 1, CHECKED_ROWS).long().to(target.device)
    with torch.inference_mode():
        own, _ = target(ids, [(target.new_cache(), len(ids))])
        hidden, _ = target(ids, [(target.new_cache(), len(ids))], (), "hidden")
        apart = float((hidden.float() @ head.T - own.float()).abs().max())
        largest = float(own.abs().max())
    allowed = 0.03 if target.dtype.itemsize < 4 else 1e-3
    if not apart <= allowed * largest:
        raise ConfigError(
            "the target's logits differ from its last hidden states times its output head by up to "
            f"{apart:.3g} (the largest is {largest:.3g}), so it has a factor or a bias, which a draft's head "
            "cannot have: no draft can be trained for it"
        )


def frozen_head(draft: DSparkDraftModel) -> Tensor:
    """The head of a draft made by `dspark.train.create`, `[draft vocabulary, hidden]`, f32, without gradients
    and not copied: with a large vocabulary it is gigabytes. To be taken before the draft is sharded."""
    if draft.lm_head is None:
        raise ConfigError("a draft in training has a head of its own")
    return draft.lm_head.weight.detach()


def teacher_logits(hidden: Tensor, head: Tensor) -> Tensor:
    """The target's logits `[rows, draft vocabulary]` of normed hidden states, without gradients.

    They have the head's own precision, also under autocast: bfloat16 logits around 20 are off by 0.06.
    """
    with torch.no_grad(), torch.autocast(head.device.type, enabled=False):
        return hidden.to(head.dtype) @ head.T
