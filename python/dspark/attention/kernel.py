"""The attention of one pass by the CUDA kernel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from dspark import _core
from dspark.attention.cache import KVStore
from dspark.kernels import stream

DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
HEAD_SIZES = (16, 64, 128, 256)
MOST_ROWS = 32
"""Most rows of a request in a verify pass or a draft block. 16 drafted tokens and their anchor are 17."""

_NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def entries(dtype: torch.dtype, head_sizes: Iterable[int]) -> list[str]:
    """The kernels that passes of these heads launch."""
    return [f"{kind}_{_NAMES[dtype]}_d{size}" for size in head_sizes for kind in ("attend", "merge")]


def suits_kernel(segments: Sequence[tuple[KVStore, int]]) -> bool:
    """Whether the kernel can and should process these segments: few rows for each request, as in a verify
    pass or a draft block, in a dtype and head size that there is an instance for."""
    data = segments[0][0].data
    return (
        data.dtype in DTYPES
        and data.shape[3] in HEAD_SIZES
        and all(rows <= MOST_ROWS for _, rows in segments)
        and not torch.is_grad_enabled()
    )


class AttentionPass:
    """The locations of rows and caches, copied to the device once for all layers, and a workspace for the
    states of split requests. Called like `_core.Attention`."""

    __slots__ = ("_device", "_kernel", "_table", "_workspace")

    def __init__(
        self,
        kernels: _core.Kernels,
        segments: Sequence[tuple[KVStore, int]],
        query_heads: int,
        reaches: list[tuple[bool, int, bool]],
    ) -> None:
        """`reaches`: (causal, window or 0, anchored) of each kind of layer."""
        first = segments[0][0]
        data = first.data
        self._kernel = _core.KernelAttention(
            kernels,
            DTYPES[data.dtype],
            first.kv_heads,
            query_heads,
            data.shape[3],
            [
                (store.data.data_ptr(), store.data.stride(0), store.data.stride(1), store.length, rows)
                for store, rows in segments
            ],
            reaches,
        )
        self._device = data.device
        self._table = torch.tensor(self._kernel.table, dtype=torch.int64, device=data.device)
        self._workspace = torch.empty(self._kernel.workspace, dtype=torch.float32, device=data.device)

    def layer(self, index: int, reach: int, input: int, row_stride: int, output: int) -> None:
        """Computes layer `index` with visibility `reaches[reach]`, by address: reads `[rows, q + k + v heads,
        head_dim]`, writes keys and values behind the cached ones, and writes `[rows, q heads * head_dim]`."""
        table, workspace = self._table.data_ptr(), self._workspace.data_ptr()
        places = input, row_stride, output, table, workspace
        self._kernel.layer(index, reach, *places, stream(self._device))
