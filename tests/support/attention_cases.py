"""Passes for the attention kernel, what they should give, and the kernel's arguments built by hand."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from cuda_host import Launcher

NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
TILE, STAGES = 16, 4


class AttendArgs(ctypes.Structure):
    """`AttendArgs` of attention.cuh."""

    _fields_ = [
        *[
            (name, ctypes.c_uint64)
            for name in ("heads", "out", "sums", "states", "segments", "chunks", "splits")
        ],
        ("row_stride", ctypes.c_int64),
        *[
            (name, ctypes.c_int32)
            for name in (
                "layer",
                "key_heads",
                "groups",
                "queries",
                "page_shift",
                "causal",
                "window",
                "anchored",
            )
        ],
    ]


@dataclass
class Case:
    """One layer's attention over requests of (cached positions, new rows).

    `page`: positions of a page, the pages of all requests shuffled into one pool; None: a cache for each.
    `chunk`: keys of a chunk. Memory that nothing should be read from is NaN.
    """

    requests: Sequence[tuple[int, int]]
    dtype: torch.dtype = torch.float32
    key_heads: int = 2
    groups: int = 3
    size: int = 64
    causal: bool = True
    window: int = 0
    anchored: bool = False
    page: int | None = None
    chunk: int = 64
    seed: int = 0
    layer: int = 1
    layers: int = 2

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.rows = sum(rows for _, rows in self.requests)
        heads = (self.groups + 2) * self.key_heads

        def numbers(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(self.dtype)

        # One column more than there are heads: rows may be apart.
        self.heads = numbers(self.rows, heads + 1, self.size)
        self.heads[:, : self.query_heads] *= 2.4 * self.size**-0.5
        self.heads[:, -1] = float("nan")
        self.cached = [numbers(2 * self.key_heads, length, self.size) for length, _ in self.requests]
        self.out = torch.full((self.rows, self.query_heads, self.size), float("nan"), dtype=self.dtype)
        self._place_caches(Random(self.seed))

    @property
    def query_heads(self) -> int:
        return self.key_heads * self.groups

    def _place_caches(self, random: Random) -> None:
        """Pools `[layers, 2 * key heads, positions, size]`, and the places of each request's positions."""
        ends = [length + rows for length, rows in self.requests]
        if self.page is None:
            self.pools = [self._pool(end + 3) for end in ends]
            self.places = [list(range(end)) for end in ends]
            self.tables = [torch.empty(0, dtype=torch.int32) for _ in ends]
        else:
            counts = [-(-end // self.page) for end in ends]
            numbers = list(range(sum(counts) + 2))
            random.shuffle(numbers)
            pool = self._pool(len(numbers) * self.page)
            self.pools, self.places, self.tables = [pool] * len(ends), [], []
            for end, count in zip(ends, counts, strict=True):
                pages, numbers = numbers[:count], numbers[count:]
                self.tables.append(torch.tensor(pages, dtype=torch.int32))
                self.places.append([pages[t // self.page] * self.page + t % self.page for t in range(end)])
        for pool, places, cached, (length, _) in zip(
            self.pools, self.places, self.cached, self.requests, strict=True
        ):
            pool[self.layer][:, places[:length]] = cached

    def _pool(self, positions: int) -> Tensor:
        return torch.full(
            (self.layers, 2 * self.key_heads, positions, self.size), float("nan"), dtype=self.dtype
        )

    def first_row(self, request: int) -> int:
        return sum(rows for _, rows in self.requests[:request])

    def keys_values(self, request: int) -> Tensor:
        """`[2 * key heads, length + rows, size]`: what request `request` should see and keep."""
        first, (_, rows) = self.first_row(request), self.requests[request]
        fresh = self.heads[first : first + rows, self.query_heads : -1].transpose(0, 1)
        return torch.cat((self.cached[request], fresh), 1)

    def sees(self, request: int) -> Tensor:
        """`[rows, length + rows]`, from the definition of the masks."""
        length, rows = self.requests[request]
        own, keys = length + torch.arange(rows)[:, None], torch.arange(length + rows)
        seen = torch.ones(rows, length + rows, dtype=torch.bool)
        if self.causal:
            seen &= keys <= own
        if self.window and self.anchored:
            seen &= keys >= length - self.window
        elif self.window:
            seen &= keys > own - self.window
        return seen

    def expected(self) -> tuple[Tensor, Tensor]:
        """Attention by its definition in float64 `[rows, query heads, size]`, and the weighted mean of
        |values|, which bounds what rounding can do."""
        outs, bounds = [], []
        for request, (_, rows) in enumerate(self.requests):
            first = self.first_row(request)
            kv = self.keys_values(request).double().repeat_interleave(self.groups, 0)
            queries = self.heads[first : first + rows, : self.query_heads].double().transpose(0, 1)
            keys, values = kv[: self.query_heads], kv[self.query_heads :]
            scores = (queries @ keys.transpose(1, 2)).masked_fill(~self.sees(request), float("-inf"))
            weights = torch.softmax(scores, -1)
            outs.append((weights @ values).transpose(0, 1))
            bounds.append((weights @ values.abs()).transpose(0, 1))
        return torch.cat(outs), torch.cat(bounds)

    # ---- the kernel's view

    def chunks(self) -> tuple[list[list[int]], list[list[int]]]:
        """Chunks (segment, start, stop, slot) and splits (segment, first slot, count)."""
        chunks: list[list[int]] = []
        splits: list[list[int]] = []
        slots = 0
        for request, (length, rows) in enumerate(self.requests):
            seen = self.sees(request).any(0).nonzero()
            if rows == 0:
                continue
            starts = list(range(int(seen[0]), length + rows, self.chunk))
            for number, start in enumerate(starts):
                slot = slots + number if len(starts) > 1 else -1
                chunks.append([request, start, min(start + self.chunk, length + rows), slot])
            if len(starts) > 1:
                splits.append([request, slots, len(starts)])
                slots += len(starts)
        return chunks, splits

    def run(self, host: Launcher, order: Random | None = None) -> None:
        """`order` shuffles chunks, and slots among each other."""
        chunks, splits = self.chunks()
        if order is not None:
            order.shuffle(chunks)
            for _, first, count in splits:
                slots = list(range(first, first + count))
                order.shuffle(slots)
                for chunk in chunks:
                    if first <= chunk[3] < first + count:
                        chunk[3] = slots[chunk[3] - first]
        most = max(rows for _, rows in self.requests) * self.groups
        slots = sum(count for _, _, count in splits) * self.key_heads * most
        segments = [
            [
                pool.data_ptr(),
                pool.stride(0),
                pool.stride(1),
                table.data_ptr(),
                length,
                rows,
                self.first_row(i),
            ]
            for i, (pool, table, (length, rows)) in enumerate(
                zip(self.pools, self.tables, self.requests, strict=True)
            )
        ]
        sums = torch.full((slots, self.size), float("nan"))
        states = torch.full((slots, 2), float("nan"))
        tables = [torch.tensor(each or [[0]], dtype=torch.int64) for each in (segments, chunks, splits)]
        made = [sums, states, *tables]
        args = AttendArgs(
            self.heads.data_ptr(),
            self.out.data_ptr(),
            *(each.data_ptr() for each in made),
            self.heads.stride(0),
            self.layer,
            self.key_heads,
            self.groups,
            most,
            (self.page or 1).bit_length() - 1,
            self.causal,
            self.window,
            self.anchored,
        )
        head_bytes = self.size * self.dtype.itemsize
        parts = 2 if 64 <= head_bytes <= 512 else 1
        most_tiles = 4 if head_bytes <= 256 else 3 if head_bytes <= 512 else 2
        tiles = -(-most // TILE)
        groups = -(-tiles // most_tiles)
        each = -(-tiles // groups)
        name = f"{NAMES[self.dtype]}_d{self.size}"
        grid = (len(chunks), self.key_heads, -(-tiles // each))
        shared = TILE * (each + STAGES * parts) * head_bytes + (parts > 1) * each * parts * TILE * TILE * 4
        pools = {id(pool): pool for pool in self.pools}.values()
        memory = [each for each in (self.heads, self.out, *made, *pools, *self.tables) if each.numel()]
        host.launch(f"attend_{name}", grid, 32 * parts * each, args, memory, shared)
        if splits:
            merge = (len(splits), max(rows for _, rows in self.requests), -(-self.query_heads // 4))
            host.launch(f"merge_{name}", merge, 128, args, memory)

    # ---- what came out

    def largest_error(self) -> float:
        """The largest |found - expected| / bound; NaN where anything is NaN."""
        expected, bound = self.expected()
        return float(((self.out.double() - expected).abs() / bound).max())

    def check_caches(self) -> None:
        """Each cache has its old positions, the new ones behind them, and nothing else was touched."""
        for pool in self.pools:
            untouched = torch.ones(pool.shape, dtype=torch.bool)
            for request, other in enumerate(self.pools):
                if other is pool:
                    places = self.places[request]
                    assert torch.equal(pool[self.layer][:, places], self.keys_values(request))
                    untouched[self.layer][:, places] = False
            assert pool[untouched].isnan().all()
