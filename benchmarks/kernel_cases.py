"""Attention and linear layers by kernel, beside what torch or another library does in their place."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.attention import CachedAttention, KVStore, attention_kernel
from dspark.checkpoint.rope import RopeConfig
from dspark.kernels import Choice
from dspark.target.hybrid.cache import HybridCache
from dspark.target.hybrid.config import DeltaSizes, HybridConfig
from dspark.target.hybrid.mixer import DeltaWeights
from dspark.target.hybrid.modules import DeltaDecay, HybridLayer
from dspark.target.hybrid.recurrence import KernelRecurrence, TorchRecurrence, recurrence

ROUNDING = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""How far two ways to compute the same thing may differ, as a fraction of the largest number."""


def apart(got: Tensor, right: Tensor) -> float:
    """The largest difference as a fraction of the largest number; NaN if only one has numbers."""
    return float((got.double() - right.double()).abs().max() / right.double().abs().max())


class AttentionCase:
    """Rows behind contexts of keys and values, in one layer."""

    def __init__(
        self,
        choice: Choice,
        device: torch.device,
        dtype: torch.dtype,
        shape: tuple[int, int, int],
        segments: list[tuple[int, int]],
        causal: bool,
        window: int | None = None,
    ) -> None:
        """`shape`: heads, key heads, head_dim; `segments`: positions before, and rows of each request."""
        self.heads, self.key_heads, self.head_dim = shape
        self.causal, self.window, self.dtype, self.segments = causal, window, dtype, []
        generator = torch.Generator().manual_seed(0)
        for length, rows in segments:
            store = KVStore(1, self.key_heads, self.head_dim, dtype, device)
            store.reserve(length + rows)
            store.data.copy_(torch.randn(store.data.shape, generator=generator))
            store.length = length
            self.segments.append((store, rows))
        count = self.heads + 2 * self.key_heads
        self.rows = torch.randn(
            sum(rows for _, rows in segments), count, self.head_dim, generator=generator
        ).to(device, dtype)
        self.rows[:, : self.heads] /= self.head_dim**0.5
        self._kernel = attention_kernel(choice, dtype, [self.head_dim])
        pass_ = (self.heads, (window,))
        self._ours = CachedAttention(self.segments, *pass_, causal, kernel=self._kernel)
        self._torchs = CachedAttention(self.segments, *pass_, causal)

    def run(self) -> Tensor:
        """By kernel."""
        if self._kernel.kernels is None:
            raise RuntimeError(f"attention: {self._kernel.how}")
        return self._ours.layer(0, self.rows)

    def by_torch(self) -> Tensor:
        """By torch, request by request."""
        return self._torchs.layer(0, self.rows)

    def exact(self) -> Tensor:
        """Two products and a softmax in float64, from the rows and what is stored before them."""
        outputs, first = [], 0
        for store, rows in self.segments:
            own, before = self.rows[first : first + rows].double(), store.data[0, :, : store.length].double()
            fresh = own[:, self.heads :].transpose(0, 1)
            keys, values = torch.cat((before, fresh), 1).split(self.key_heads)
            queries = own[:, : self.heads].unflatten(1, (self.key_heads, -1))
            scores = torch.einsum("rhgd,htd->hgrt", queries, keys)
            if self.causal:
                last = torch.arange(store.length, store.length + rows, device=scores.device)[:, None]
                key = torch.arange(store.length + rows, device=scores.device)
                hidden = key > last
                if self.window is not None:
                    hidden |= key <= last - self.window
                scores.masked_fill_(hidden, float("-inf"))
            mixed = torch.einsum("hgrt,htd->rhgd", scores.softmax(-1), values)
            outputs.append(mixed.reshape(rows, -1))
            first += rows
        return torch.cat(outputs)

    def compare(self) -> tuple[float, float]:
        """The largest difference from `exact` as a fraction of the largest number, and what is allowed."""
        found, first = self.run(), 0
        for store, rows in self.segments:
            fresh = self.rows[first : first + rows, self.heads :].transpose(0, 1)
            if not torch.equal(store.data[0, :, store.length : store.length + rows], fresh):
                return float("inf"), 0.0  # what later passes would read
            first += rows
        return apart(found, self.exact()), self.allowed()

    def compare_torchs(self) -> tuple[float, float]:
        """The same for what torch does in the kernel's place."""
        return apart(self.by_torch(), self.exact()), self.allowed()

    def allowed(self) -> float:
        """What `compare` allows. In float32, tensor cores truncate long sums instead of rounding them: see
        attention_products.cuh; no chunk is longer than its request."""
        cut = 3 / 8 * max(store.length for store, _ in self.segments) * 2**-23
        return ROUNDING[self.dtype] + (cut if self.dtype == torch.float32 else 0)

    def sdpa(self) -> Callable[[], object]:
        """One call of SDPA for the batch, whose requests must all have the same positions and rows."""
        batch, (store, rows) = len(self.segments), self.segments[0]
        keys, values = (
            torch.stack([s.data[0, part] for s, _ in self.segments])
            for part in (slice(self.key_heads), slice(self.key_heads, None))
        )
        queries = self.rows[:, : self.heads].view(batch, rows, self.heads, self.head_dim).transpose(1, 2)
        length = store.length + rows
        seen = torch.ones(rows, length, dtype=torch.bool, device=keys.device).tril_(store.length)
        mask = seen if self.causal else None

        def run() -> Tensor:
            return F.scaled_dot_product_attention(queries, keys, values, mask, scale=1.0, enable_gqa=True)

        return run

    def flashinfer(self) -> Callable[[], object]:
        """FlashInfer's paged kernel for a few rows, with pages of 16 positions; ImportError without it."""
        import flashinfer

        batch, (store, rows) = len(self.segments), self.segments[0]
        page, length = 16, store.length + rows
        pages = -(-length // page)
        device = self.rows.device
        shape = (batch * pages, page, self.key_heads, self.head_dim)
        cache = tuple(torch.randn(shape, device=device, dtype=self.dtype) for _ in range(2))
        whole = torch.arange(batch + 1, dtype=torch.int32, device=device)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            torch.empty(128 << 20, dtype=torch.uint8, device=device), "NHD"
        )
        wrapper.plan(
            whole * rows,
            whole * pages,
            torch.arange(batch * pages, dtype=torch.int32, device=device),
            torch.full((batch,), (length - 1) % page + 1, dtype=torch.int32, device=device),
            self.heads,
            self.key_heads,
            self.head_dim,
            page,
            causal=self.causal,
            sm_scale=1.0,
            q_data_type=self.dtype,
        )
        queries = self.rows[:, : self.heads].contiguous()
        return lambda: wrapper.run(queries, cache)


def delta_config(sizes: DeltaSizes, layers: int) -> HybridConfig:
    """Linear layers alone, in a narrow model, whose products are not measured."""
    return HybridConfig(
        architecture="Qwen3_5ForCausalLM",
        vocab_size=8,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        attention_bias=False,
        rope=RopeConfig(),
        rotary_dim=4,
        is_linear=(True,) * layers,
        delta=sizes,
    )


class DeltaCase:
    """Linear layers between their products, on two sides whose states start equal."""

    def __init__(
        self,
        choice: Choice,
        device: torch.device,
        dtype: torch.dtype,
        sizes: DeltaSizes,
        layers: int,
        counts: list[int],
    ) -> None:
        torch.manual_seed(0)
        config = delta_config(sizes, layers)
        layer, decay = HybridLayer(config, linear=True), DeltaDecay(sizes, config.rms_norm_eps)
        decay.A_log.data.normal_().sub_(1.5)
        self.weights = DeltaWeights(layer.to(device, dtype), decay.to(device), sizes)
        self.counts, self.layers, self.dtype = counts, layers, dtype
        width = sizes.channels + sizes.values + 2 * sizes.value_heads
        self.mixed = torch.randn(sum(counts), width, device=device).to(dtype)
        ours = recurrence(choice, sizes, dtype)
        if not isinstance(ours, KernelRecurrence):
            raise RuntimeError(f"recurrence: {ours.how}")
        self._sides = (ours, TorchRecurrence(sizes, "to compare with"))
        self._caches = [[HybridCache(config, dtype, device) for _ in counts] for _ in self._sides]
        for a, b in zip(*self._caches, strict=True):
            b.state.copy_(a.state.normal_())
            b.conv.copy_(a.conv.normal_())
        self._passes = [
            side.begin(list(zip(caches, counts, strict=True)))
            for side, caches in zip(self._sides, self._caches, strict=True)
        ]

    def rows(self, side: int) -> list[Tensor]:
        """All layers of a pass that has begun."""
        run = self._passes[side]
        return [run.layer(index, self.mixed, self.weights) for index in range(self.layers)]

    def commit(self, side: int, kept: list[int]) -> None:
        """Commits the first rows of the last pass; afterwards the same rows wait again."""
        for cache, count in zip(self._caches[side], kept, strict=True):
            pending = cache._pending
            if count and pending is not None:
                pending[0].commit(pending[1], count, cache.conv, cache.state)

    def compare(self) -> tuple[float, float]:
        """Compares outputs, and the states after half of the rows are kept."""
        worst = max(apart(a, b) for a, b in zip(self.rows(0), self.rows(1), strict=True))
        kept = [(count + 1) // 2 for count in self.counts]
        for side in range(2):
            self.commit(side, kept)
        states = [apart(a.state, b.state) for a, b in zip(*self._caches, strict=True)]
        states += [apart(a.conv, b.conv) for a, b in zip(*self._caches, strict=True)]
        if not max(states) <= ROUNDING[torch.float32]:  # float32 whatever the activations
            return max(states), ROUNDING[torch.float32]
        return worst, ROUNDING[self.dtype]
