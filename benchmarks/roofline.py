"""What each kernel must read and write, and multiply, at the flagship's sizes: the least time it can take.

Counted from shapes alone: every input once, every output once; what stays in registers, shared memory or the
L2 cache is free. Intensities are f32 operations (a multiplication and an addition are two) per byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

LAYERS_FULL, LAYERS_DELTA = 16, 48
HEADS, KEY_HEADS, HEAD_DIM = 24, 4, 256
"""Of the target's full attention."""

DRAFT_LAYERS, DRAFT_HEADS, DRAFT_KEY_HEADS, DRAFT_HEAD_DIM = 5, 32, 8, 128
BLOCK, RANK = 7, 256
"""Drafted tokens, and the Markov head's rank."""

DELTA_KEY_HEADS, DELTA_HEADS, DELTA_DIM, TAPS = 16, 48, 128, 4
CHANNELS = (2 * DELTA_KEY_HEADS + DELTA_HEADS) * DELTA_DIM
VALUES = DELTA_HEADS * DELTA_DIM
STATE = DELTA_HEADS * DELTA_DIM * DELTA_DIM
"""Numbers in the state of one request and layer."""

VOCABULARY = 248_320
HALF, SINGLE = 2, 4
"""Bytes of activations (bfloat16), and of states and what a commit needs (float32)."""


@dataclass(frozen=True)
class Setting:
    """A round: requests, each with `rows` rows to verify (anchor and drafted tokens) of which `kept` stay,
    over `context` positions."""

    requests: int = 8
    rows: int = 1 + BLOCK
    kept: int = 4
    context: int = 8192


@dataclass(frozen=True)
class Work:
    """One launch of a kernel, and how many a round has."""

    kernel: str
    shape: str
    launches: int
    read: int
    written: int
    operations: int

    @property
    def bytes(self) -> int:
        return self.read + self.written

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.operations / self.bytes

    def microseconds(self, gigabytes_per_second: float) -> float:
        """Of one launch, at a bandwidth."""
        return self.bytes / gigabytes_per_second / 1e3


def works(setting: Setting) -> Iterator[Work]:
    """All kernels of one round."""
    yield verify_attention(setting)
    yield draft_attention(setting)
    yield delta_rows(setting)
    yield delta_commit(setting)
    yield verify_sampling(setting)
    yield markov_step(setting)


def verify_attention(s: Setting) -> Work:
    """Grouped-query attention of a layer: each request's keys and values once, for all its rows and heads."""
    keys = s.requests * (s.context + s.rows)
    read = 2 * keys * KEY_HEADS * HEAD_DIM * HALF
    read += s.requests * s.rows * HEADS * HEAD_DIM * HALF
    written = s.requests * s.rows * (HEADS + 2 * KEY_HEADS) * HEAD_DIM * HALF
    operations = 4 * s.rows * HEADS * HEAD_DIM * keys
    shape = f"{HEADS}/{KEY_HEADS} heads of {HEAD_DIM}"
    return Work("verify attention", shape, LAYERS_FULL, read, written, operations)


def draft_attention(s: Setting) -> Work:
    """The same for a block over the draft's context."""
    keys, rows = s.requests * (s.context + BLOCK), s.requests * BLOCK
    read = 2 * keys * DRAFT_KEY_HEADS * DRAFT_HEAD_DIM * HALF + rows * DRAFT_HEADS * DRAFT_HEAD_DIM * HALF
    written = rows * DRAFT_HEADS * DRAFT_HEAD_DIM * HALF
    operations = 4 * BLOCK * DRAFT_HEADS * DRAFT_HEAD_DIM * keys
    shape = f"{DRAFT_HEADS}/{DRAFT_KEY_HEADS} heads of {DRAFT_HEAD_DIM}"
    return Work("draft attention", shape, DRAFT_LAYERS, read, written, operations)


def delta_rows(s: Setting) -> Work:
    """A linear layer between its products: the state once, for queries and keys of all rows; then the scores
    of rows with each other, and a triangular system per column."""
    rows = s.requests * s.rows
    read = s.requests * (STATE + (TAPS - 1) * CHANNELS) * SINGLE
    read += rows * (CHANNELS + VALUES + 2 * DELTA_HEADS) * HALF
    written = rows * VALUES * HALF + waiting(rows)
    row = 4 * DELTA_DIM * DELTA_DIM + 4 * s.rows * DELTA_DIM + 2 * s.rows * DELTA_DIM
    operations = rows * (DELTA_HEADS * row + 2 * TAPS * CHANNELS)
    shape = f"{DELTA_KEY_HEADS}/{DELTA_HEADS} heads of {DELTA_DIM}"
    return Work("delta rows", shape, LAYERS_DELTA, read, written, operations)


def delta_commit(s: Setting) -> Work:
    """The commit of one request in all linear layers: its states read and written, the kept rows read."""
    states = LAYERS_DELTA * (STATE + (TAPS - 1) * CHANNELS) * SINGLE
    read = states + LAYERS_DELTA * waiting(s.kept)
    operations = LAYERS_DELTA * STATE * (1 + 2 * s.kept)
    shape = f"{LAYERS_DELTA} layers, {s.kept} rows kept"
    return Work("delta commit", shape, s.requests, read, states, operations)


def waiting(rows: int) -> int:
    """Bytes that rows leave for the commit, per layer: convolution inputs, keys, log decays, updates."""
    return rows * (CHANNELS * HALF + (DELTA_KEY_HEADS * DELTA_DIM + DELTA_HEADS + VALUES) * SINGLE)


def verify_sampling(s: Setting) -> Work:
    """The target's logits of all rows once, the draft's of the drafted tokens once: statistics, the ratio,
    the draw from the residual."""
    rows, drafted = s.requests * s.rows, s.requests * (s.rows - 1)
    read = (rows + drafted) * VOCABULARY * HALF
    return Work("verify sampling", f"vocabulary {VOCABULARY}", 1, read, 8 * rows, 8 * read // HALF)


def markov_step(s: Setting) -> Work:
    """One step of a block's chain: the head's second matrix once for the batch, a row of logits each."""
    read = VOCABULARY * RANK * HALF + s.requests * VOCABULARY * HALF
    operations = s.requests * VOCABULARY * (2 * RANK + 8)
    return Work(
        "Markov step", f"vocabulary {VOCABULARY}, rank {RANK}", BLOCK, read, 8 * s.requests, operations
    )


def table(setting: Setting, gigabytes_per_second: float) -> str:
    """As Markdown."""
    head = (
        f"| kernel | shape | launches a round | MB a launch | operations per byte "
        f"| µs a launch at {gigabytes_per_second:g} GB/s | ms a round |\n|---|---|---|---|---|---|---|\n"
    )
    lines, total = [], 0.0
    for work in works(setting):
        once = work.microseconds(gigabytes_per_second)
        round_ms = once * work.launches / 1e3
        total += round_ms
        lines.append(
            f"| {work.kernel} | {work.shape} | {work.launches} | {work.bytes / 1e6:.1f} "
            f"| {work.intensity:.1f} | {once:.1f} | {round_ms:.2f} |"
        )
    lines.append(f"| together | | | | | | {total:.2f} |")
    return head + "\n".join(lines)
