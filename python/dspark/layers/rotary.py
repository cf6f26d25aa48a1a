"""Rotary position embedding in the half-split layout of Llama and Qwen, with its context extensions.

The angles are computed in float32, as in training, whatever the model's dtype: they are part of the model.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dspark.checkpoint.rope import RopeConfig
from dspark.layers.norm import accumulation_dtype


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Angle per position of each pair, `[head_dim / 2]` in f32, and the factor on cosines and sines."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, frequencies), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, frequencies, head_dim), _yarn_attention_factor(rope)
    if rope.kind == "proportional":
        return _proportional(rope, frequencies), 1.0
    return frequencies, 1.0


def _proportional(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Gemma 4: the first part of the pairs keeps the whole head's frequencies, the rest does not rotate."""
    rotating = int(rope.proportion * 2 * frequencies.shape[0] // 2)
    still = torch.arange(frequencies.shape[0]) >= rotating
    return (frequencies / rope.factor).masked_fill(still, 0.0)


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Llama 3.1: long waves are stretched by the factor, short ones kept, those between blended."""
    waves = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    blend = (waves - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1.0 - blend) * frequencies / rope.factor + blend * frequencies


def _yarn(rope: RopeConfig, frequencies: Tensor, head_dim: int) -> Tensor:
    """YaRN (arXiv 2309.00071, section 3.2): a ramp over the pairs from extrapolation to interpolation."""

    def pair_turning(times: float) -> float:
        reach = rope.original_max_position_embeddings / (times * 2 * math.pi)
        return head_dim * math.log(reach) / (2 * math.log(rope.theta))

    low, high = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2).float() - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies / rope.factor * ramp + frequencies * (1.0 - ramp)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    """The temperature of YaRN (its section 3.4), as a factor on queries and keys alike."""

    def magnitude(scale: float) -> float:
        return 1.0 if rope.factor <= 1.0 else 0.1 * scale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)


class RotaryTable:
    """Cosines and sines by position, grown by doubling as positions are needed.

    A row of the table is `[2, head_dim]`: cosines, then sines whose first half is negated, so that a rotation
    is x cos + roll(x, head_dim / 2) sin.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._frequencies, self._factor = inverse_frequencies(rope, head_dim)
        self._dtype = accumulation_dtype(dtype)
        self._device = device
        self._table = self._compute(512)

    def _compute(self, positions: int) -> Tensor:
        # Not an inference tensor even if grown inside `inference_mode`: training may read the same table.
        with torch.inference_mode(False), torch.no_grad():
            angles = torch.arange(positions).float()[:, None] * self._frequencies
            cosines, sines = angles.cos() * self._factor, angles.sin() * self._factor
            table = torch.stack((torch.cat((cosines, cosines), -1), torch.cat((-sines, sines), -1)))
            return table.to(device=self._device, dtype=self._dtype)

    def span(self, start: int, stop: int) -> Tensor:
        """The rows of positions start .. stop - 1, `[2, stop - start, head_dim]` (a view)."""
        if stop > self._table.shape[1]:
            self._table = self._compute(1 << (stop - 1).bit_length())
        return self._table[:, start:stop]

    def at(self, positions: Tensor) -> Tensor:
        """The rows of any positions, `[2, len(positions), head_dim]`."""
        self.span(0, int(positions.max()) + 1 if positions.numel() else 0)
        return self._table[:, positions]

    def spans(self, spans: list[tuple[int, int]]) -> Tensor:
        """The rows of several spans, one after the other."""
        if len(spans) == 1:
            return self.span(*spans[0])
        return torch.cat([self.span(start, stop) for start, stop in spans], dim=1)


def rotate(x: Tensor, rows: Tensor) -> Tensor:
    """Rotates x `[rows, heads, head_dim]` by table rows `[2, rows, head_dim]`, differentiably."""
    rows = rows.unsqueeze(2)
    return (x * rows[0] + x.roll(x.shape[-1] // 2, -1) * rows[1]).to(x.dtype)
