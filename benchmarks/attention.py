"""Attention of a verify pass over a long context: the core's against torch's.

    python benchmarks/attention.py [--turns 15] [--rows 6] [--keys 1000 8000 32000]

One request, float32, heads of 128, one layer. "core" is what decoding uses; "whole" is the core without its
division of a key head's keys among threads, which it makes where there are more threads than key heads;
"torch" is `scaled_dot_product_attention` over the same cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from dspark import _core
from dspark.attention.cache import KVStore
from dspark.attention.functional import attend
from dspark.attention.visible import Visible
from dspark.attention.workers import parallel_region
from measure import interleaved, machine

HEADS = ((1, 8), (2, 14), (8, 32))
"""Key heads and query heads: of models from 0.5 B (the second, Qwen2.5's) to 8 B parameters."""

SIZE = 128
LAYERS = 4
"""Caches that take turns, so that keys and values come from memory."""


def sides(key_heads: int, query_heads: int, keys: int, rows: int) -> dict[str, Callable[[], object]]:
    store = KVStore(LAYERS, key_heads, SIZE, torch.float32, torch.device("cpu"))
    store.reserve(keys + rows)
    store.data.normal_()
    store.advance(keys)
    heads = torch.randn(rows, query_heads + 2 * key_heads, SIZE) / SIZE**0.5
    out = torch.empty(rows, query_heads * SIZE)
    segment = (store.data.data_ptr(), store.capacity, store.length, rows)
    queries, visible = heads[:, :query_heads], Visible(rows, keys + rows, causal=True)
    mask = visible.mask(torch.float32, store.data.device)

    def core(threads: int) -> Callable[[], object]:
        sizes = (key_heads, query_heads, SIZE, [segment], [(True, 0, False)])
        each = _core.Attention("float32", *sizes, parallel_region(), threads)

        def run() -> None:
            for layer in range(LAYERS):
                each.layer(layer, 0, heads.data_ptr(), heads.stride(0), out.data_ptr())

        return run

    def by_torch() -> None:
        for cached_keys, cached_values in zip(
            store.keys(keys + rows), store.values(keys + rows), strict=True
        ):
            attend(queries, cached_keys, cached_values, visible, mask)

    return {"core": core(torch.get_num_threads()), "whole": core(1), "torch": by_torch}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--rows", type=int, default=6)
    parser.add_argument("--keys", type=int, nargs="+", default=[1000, 8000, 32000])
    options = parser.parse_args()
    print(machine())
    print(f"{options.rows} rows; ms per layer, medians\n")
    print("key heads, queries    keys     core    whole    torch")
    for key_heads, query_heads in HEADS:
        for keys in options.keys:
            found = interleaved(sides(key_heads, query_heads, keys, options.rows), options.turns)
            times = "".join(f"{one.median / LAYERS * 1e3:9.2f}" for one in found.values())
            print(f"{key_heads:9}, {query_heads:<7} {keys:7}{times}")


if __name__ == "__main__":
    main()
