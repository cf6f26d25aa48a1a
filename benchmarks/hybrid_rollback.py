"""What rolling a hybrid target back costs per round, at the sizes of a 27B model.

    OMP_NUM_THREADS=1 python benchmarks/hybrid_rollback.py [--layers 48] [--rows 8] [--turns 9]

The weights are those of one Gated-DeltaNet layer, and the time of products with them is scaled up; states,
what waits for the commit, the delta rule and the commit itself are those of all layers, so that none of them
is in the CPU's cache. Sides: a verify pass, its part after the products with weights, and the commit of 0 to
all rows; against two other ways to be exact: copy the states before the pass and, unless everything was kept,
put them back and run the kept rows again; or write the state after every row. Memory is counted on the
tensors, and compared with what the shapes say.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from dspark.checkpoint.rope import RopeConfig
from dspark.target.hybrid.cache import HybridCache
from dspark.target.hybrid.config import DeltaSizes, HybridConfig
from dspark.target.hybrid.frozen import FrozenMLP
from dspark.target.hybrid.mixer import DeltaWeights
from dspark.target.hybrid.modules import DeltaDecay, HybridLayer
from dspark.target.hybrid.segments import DeltaPass
from measure import interleaved, machine

SIZES = DeltaSizes(key_heads=16, value_heads=48, key_dim=128, value_dim=128, kernel=4)
"""With 48 value heads, though not with 32, the model below has 27 B parameters."""

TOTAL = 26_893_000_000
"""Parameters of the text model: 48 such layers, 16 with full attention, embeddings and output head."""


def config(layers: int) -> HybridConfig:
    """A configuration with linear layers alone."""
    return HybridConfig(
        architecture="Qwen3_5ForConditionalGeneration",
        vocab_size=248_320,
        hidden_size=5120,
        intermediate_size=17_408,
        num_hidden_layers=layers,
        num_attention_heads=24,
        num_key_value_heads=4,
        head_dim=256,
        max_position_embeddings=262_144,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        attention_bias=False,
        rope=RopeConfig(),
        rotary_dim=64,
        is_linear=(True,) * layers,
        delta=SIZES,
    )


def filled(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Fills weights with numbers of a realistic size by repeating one tile: drawing 383 million numbers would
    take longer than everything else."""
    tile = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)) * 0.01
    for name, parameter in list(module.named_parameters()):
        values = tile.repeat(parameter.numel() // len(tile) + 1)[: parameter.numel()].view(parameter.shape)
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, nn.Parameter(values.to(dtype), requires_grad=False))
    return module


class Bench:
    """One layer's weights, and one request's states for all layers."""

    def __init__(self, layers: int, rows: int, dtype: torch.dtype) -> None:
        self.config, self.layers, self.rows = config(layers), layers, rows
        with torch.device("meta"):
            layer = HybridLayer(self.config, linear=True)
            decay = DeltaDecay(SIZES, self.config.rms_norm_eps)
        filled(layer, dtype)
        filled(decay, torch.float32)
        self.parameters = sum(p.numel() for module in (layer, decay) for p in module.parameters())
        self.mixer = DeltaWeights(layer, decay, SIZES)
        self.mlp = FrozenMLP(layer.post_attention_layernorm, layer.mlp)
        self.cache = HybridCache(self.config, dtype, torch.device("cpu"))
        self.x = torch.randn(rows, self.config.hidden_size).to(dtype)
        self.mixed = self.mixer.product(self.mixer.norm(self.x))
        self.delta(rows)
        self.waiting = self.cache._pending
        self.room = self.cache.state.new_empty(self.cache.state.shape)

    def products(self) -> Tensor:
        """One layer's norms and products with weights."""
        mixed = self.mixer.product(self.mixer.norm(self.x))
        return self.mlp(self.mixer.output.add(mixed[:, : SIZES.values], self.x))

    def delta(self, rows: int) -> None:
        """Everything but products with weights, of all layers."""
        part = DeltaPass([(self.cache, rows)], SIZES)
        for index in range(self.layers):
            part.layer(index, self.mixed[:rows], self.mixer)

    def commit(self, count: int) -> None:
        """Commits all layers; the same rows every time."""
        self.cache._pending = self.waiting
        self.cache.advance(count)
        self.cache.kv.length = 0

    def replay(self, kept: int) -> None:
        """Copies the states, puts them back, runs the kept rows again and commits them."""
        self.room.copy_(self.cache.state)
        self.cache.state.copy_(self.room)
        self.delta(kept)
        self.cache.advance(kept)
        self.cache.kv.length = 0

    def every_state(self) -> None:
        """Writes as many states as rows: the least that a state per row costs."""
        for _ in range(self.rows):
            torch.mul(self.cache.state, 0.99, out=self.room)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with torch.inference_mode():
        bench = Bench(options.layers, options.rows, getattr(torch, options.dtype))
        print(machine())
        print(
            f"{options.dtype}, {options.rows} rows, one layer has {bench.parameters / 1e6:.0f} M parameters\n"
        )
        costs(bench, options.turns)
        memory(bench)


def costs(bench: Bench, turns: int) -> None:
    """Milliseconds per round of all layers, and shares of a whole verify pass."""
    rows, half = bench.rows, bench.rows // 2
    passes = interleaved({"products": bench.products, "delta": lambda: bench.delta(rows)}, turns)
    times = interleaved(
        {
            "commit, 0 kept": lambda: bench.commit(0),
            "commit, 1 kept": lambda: bench.commit(1),
            f"commit, {half} kept": lambda: bench.commit(half),
            f"commit, all {rows} kept": lambda: bench.commit(rows),
            "copy and replay, 1 kept": lambda: bench.replay(1),
            f"copy and replay, {half} kept": lambda: bench.replay(half),
            "a state per row": bench.every_state,
        },
        turns,
    )
    delta = passes["delta"].median
    whole = passes["products"].median * TOTAL / bench.parameters + delta
    print(f"verify pass of the whole model, products by parameters {whole * 1e3:9.1f} ms")
    print(
        f"of it, delta rule, convolution: {bench.layers} layers {delta * 1e3:9.1f} ms {delta / whole:7.2%}\n"
    )
    for name, sample in times.items():
        print(f"{name:28} {sample!s:>36} {sample.median / whole:7.2%}")


def memory(bench: Bench) -> None:
    """MB per request, all layers."""

    def megabytes(*tensors: Tensor) -> float:
        return sum(t.numel() * t.element_size() for t in tensors) / 1e6

    states = megabytes(bench.cache.state, bench.cache.conv)
    assert bench.waiting is not None
    group = bench.waiting[0]
    waiting = megabytes(group._keys, group._updates, group._decays, group._conv)
    width = SIZES.key_heads * SIZES.key_dim + SIZES.values + SIZES.value_heads + SIZES.channels
    shapes = (bench.rows * width + (SIZES.kernel - 1) * SIZES.channels) * bench.layers
    if abs(waiting - shapes * bench.cache.state.element_size() / 1e6) > 1e-6:
        raise SystemExit(f"what waits has {waiting} MB, which is not what the shapes say")
    print(f"\nper request, {bench.layers} layers:")
    print(f"  states, recurrent and convolution, always there  {states:8.1f} MB")
    print(f"  what waits between a pass and its commit         {waiting:8.1f} MB for {bench.rows} rows")
    print(f"  a copy of the states instead                     {states:8.1f} MB")
    print(f"  a state per row instead                          {states * bench.rows:8.1f} MB")


if __name__ == "__main__":
    main()
