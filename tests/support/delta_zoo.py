"""Random passes through Gated-DeltaNet layers: what the kernels get, and a float64 reference of what is due.

The reference takes one row after the other, as the rule is written down, and shares nothing with the package.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cuda_host import Launcher

UNIT_EPS, NORM_EPS = 1e-6, 1e-5
ENTRY = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


class Sizes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in ("key_heads", "groups", "key_dim", "value_dim", "taps")]

    @property
    def value_heads(self) -> int:
        return int(self.key_heads * self.groups)

    @property
    def channels(self) -> int:
        return int(2 * self.key_heads * self.key_dim + self.values)

    @property
    def values(self) -> int:
        return int(self.value_heads * self.value_dim)

    @property
    def width(self) -> int:
        """Of what a layer's first product gives: channels, gate z, b, a."""
        return self.channels + self.values + 2 * self.value_heads


def _addresses(*names: str) -> list[tuple[str, type[ctypes.c_uint64]]]:
    return [(name, ctypes.c_uint64) for name in names]


class RowsArgs(ctypes.Structure):
    _fields_ = [
        *_addresses("requests", "mixed", "taps", "rate", "time_bias", "head_weight", "out"),
        *_addresses("inputs", "keys", "log_decays", "updates"),
        ("unit_eps", ctypes.c_float),
        ("head_eps", ctypes.c_float),
        ("sizes", Sizes),
        ("layer", ctypes.c_int32),
    ]


class CarryArgs(ctypes.Structure):
    _fields_ = [
        *_addresses("state", "conv", "inputs", "keys", "log_decays", "updates"),
        ("rows", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("sizes", Sizes),
        ("count", ctypes.c_int32),
    ]


@dataclass
class Weights:
    """Of one layer, float32."""

    taps: Tensor
    rate: Tensor
    time_bias: Tensor
    head_weight: Tensor | None


@dataclass
class Pass:
    """Requests with `counts` rows each, over states of their own; everything random but reproducible."""

    sizes: Sizes
    counts: Sequence[int]
    dtype: torch.dtype = torch.float32
    layers: int = 2
    weighted: bool = True
    seed: int = 0
    states: list[Tensor] = field(init=False)
    convs: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        sizes, generator = self.sizes, torch.Generator().manual_seed(self.seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        state = (self.layers, sizes.key_heads, sizes.key_dim, sizes.groups, sizes.value_dim)
        self.states = [draw(*state) for _ in self.counts]
        self.convs = [
            draw(self.layers, sizes.taps - 1, sizes.channels).to(self.dtype).float() for _ in self.counts
        ]
        self.mixed = draw(self.layers, self.rows, sizes.width).to(self.dtype)
        self.weights = [
            Weights(
                0.7 * draw(sizes.taps, sizes.channels),
                -torch.exp(draw(sizes.value_heads) - 1.5),  # decays from almost 1 to 1/2
                0.5 * draw(sizes.value_heads),
                1 + 0.4 * torch.tanh(draw(sizes.values)) if self.weighted else None,
            )
            for _ in range(self.layers)
        ]
        nan = float("nan")
        self.out = torch.full((self.layers, self.rows, sizes.values), nan, dtype=self.dtype)
        self.inputs = torch.full((self.layers, self.rows, sizes.channels), nan, dtype=self.dtype)
        self.keys = torch.full((self.layers, self.rows, sizes.key_heads, sizes.key_dim), nan)
        self.log_decays = torch.full((self.layers, self.rows, sizes.value_heads), nan)
        self.updates = torch.full((self.layers, self.rows, sizes.values), nan)

    @property
    def rows(self) -> int:
        return sum(self.counts)

    @property
    def firsts(self) -> list[int]:
        return [sum(self.counts[:number]) for number in range(len(self.counts))]

    @property
    def head_eps(self) -> float:
        """Outputs are neither divided by the root of key_dim nor by that of value_dim before their norm."""
        return float(self.sizes.value_dim * self.sizes.key_dim) * NORM_EPS


def run_rows(host: Launcher, data: Pass) -> None:
    """The rows of all layers, into `out` and what a commit needs."""
    sizes = data.sizes
    table = [
        (state.data_ptr(), conv.data_ptr(), first, count)
        for state, conv, first, count in zip(data.states, data.convs, data.firsts, data.counts, strict=True)
    ]
    requests = torch.tensor(table, dtype=torch.int64)
    most = next(most for most in (4, 8, 16) if max(data.counts) <= most)
    shared = sizes.key_dim * (2 * most + 4) + most * sizes.value_dim
    shared += 2 * most * (sizes.value_dim + most) + 4 * most
    for layer, weights in enumerate(data.weights):
        weight = torch.empty(0) if weights.head_weight is None else weights.head_weight
        written = (data.out, data.inputs, data.keys, data.log_decays, data.updates)
        tensors = [requests, data.mixed[layer], weights.taps, weights.rate, weights.time_bias, weight]
        tensors += [tensor[layer] for tensor in written]
        places = (tensor.data_ptr() for tensor in tensors)
        args = RowsArgs(*places, UNIT_EPS, data.head_eps, sizes, layer)
        grid = (sizes.value_heads, len(data.counts), 1)
        entry = f"delta_rows_{ENTRY[data.dtype]}_r{most}"
        reached = [tensor for tensor in (*tensors, *data.states, *data.convs) if tensor.numel()]
        host.launch(entry, grid, threads(sizes) + 32, args, reached, 4 * shared)


def run_carry(host: Launcher, data: Pass, request: int, kept: int) -> None:
    """The commit of a request's first rows, in all layers."""
    sizes = data.sizes
    tensors = [
        data.states[request],
        data.convs[request],
        data.inputs,
        data.keys,
        data.log_decays,
        data.updates,
    ]
    args = CarryArgs(*(tensor.data_ptr() for tensor in tensors), data.rows, data.firsts[request], sizes, kept)
    grid = (sizes.value_heads, data.layers, 1)
    shared = 4 * (sizes.key_dim * 20 + 17)
    reached = [tensor for tensor in tensors if tensor.numel()]
    host.launch(f"delta_carry_{ENTRY[data.dtype]}", grid, threads(sizes), args, reached, shared)


def threads(sizes: Sizes) -> int:
    """That read a state: two columns each, four parts of the keys."""
    return 4 * (((sizes.value_dim + 1) // 2 + 31) // 32 * 32)


@dataclass
class Expected:
    """Of one request and layer, float64: outputs `[rows, values]`, and what the states are after each number
    of rows, from none on."""

    out: Tensor
    states: list[Tensor]
    convs: list[Tensor]


def expected(data: Pass, layer: int, request: int) -> Expected:
    """One row after the other."""
    sizes, weights = data.sizes, data.weights[layer]
    state, conv = data.states[request][layer].double(), data.convs[request][layer].double()
    taps, rate, bias = weights.taps.double(), weights.rate.double(), weights.time_bias.double()
    outs, states, convs = [], [state], [conv]
    keys = sizes.key_heads * sizes.key_dim
    first = data.firsts[request]
    for row in data.mixed[layer, first : first + data.counts[request]].double():
        x, gate, b, a = row.split([sizes.channels, sizes.values, sizes.value_heads, sizes.value_heads])
        seen = torch.cat((conv, x.unsqueeze(0)))
        conv = seen[1:]
        mixed = silu((seen * taps).sum(0))
        queries, units, values = mixed.split([keys, keys, sizes.values])
        queries, units = (unit(each.view(sizes.key_heads, sizes.key_dim)) for each in (queries, units))
        values = values.view(sizes.key_heads, sizes.groups, sizes.value_dim)
        decay = torch.exp(rate * torch.log1p(torch.exp(a + bias))).view(sizes.key_heads, 1, sizes.groups, 1)
        strength = (1 / (1 + torch.exp(-b))).view(sizes.key_heads, sizes.groups, 1)
        state = decay * state
        update = strength * (values - torch.einsum("hkgv,hk->hgv", state, units))
        state = state + torch.einsum("hk,hgv->hkgv", units, update)
        read = torch.einsum("hkgv,hk->hgv", state, queries) / sizes.key_dim**0.5
        normed = read / torch.sqrt((read**2).mean(-1, keepdim=True) + NORM_EPS)
        scaled = normed.flatten() / sizes.value_dim**0.5  # the root joins the weight
        if weights.head_weight is not None:
            scaled = scaled * weights.head_weight.double()
        outs.append(scaled * silu(gate))
        states.append(state)
        convs.append(conv)
    out = torch.stack(outs) if outs else torch.empty(0, sizes.values, dtype=torch.float64)
    return Expected(out, states, convs)


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def unit(x: Tensor) -> Tensor:
    return x / torch.sqrt((x**2).sum(-1, keepdim=True) + UNIT_EPS)
