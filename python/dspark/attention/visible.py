"""Which keys the newest rows of a sequence see, as additive masks."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

SHORTEST_REACH = 1024


class Visible:
    """Visibility of R rows that end at the last of T keys.

    Causal: row i sees the keys up to T - R + i, with a window no more than the last `window` of these, its
    own included. Not causal: every row sees every key. An anchored window does not slide: of the keys before
    the first row every row sees the last `window`, and the window hides nothing else.
    """

    __slots__ = ("anchored", "causal", "first", "rows", "total", "window")

    def __init__(
        self, rows: int, total: int, causal: bool, window: int | None = None, anchored: bool = False
    ) -> None:
        self.rows, self.total, self.causal, self.window = rows, total, causal, window
        self.anchored = anchored
        self.first = max(0, total - rows - window + (not anchored)) if window is not None else 0
        """The first key that any row sees."""

    def piece(self, start: int, stop: int) -> Visible:
        """Visibility of rows start .. stop - 1 alone; if causal, its `total` excludes the keys after them."""
        total = self.total - self.rows + stop if self.causal else self.total
        window = self.window
        # An anchored window counts from this piece's first row, so it reaches farther back.
        if self.anchored and window is not None:
            window += (total - (stop - start)) - (self.total - self.rows)
        return Visible(stop - start, total, self.causal, window, self.anchored)

    def mask(self, groups: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """The additive mask, or None where nothing is hidden. On a CPU `[rows * groups, total - first]`, each
        row `groups` times, cut from a cached mask; elsewhere `[rows, total - first]`, see `fresh_mask`."""
        if not self.causal or (self.rows == 1 and self.total - self.first <= (self.window or self.total)):
            return None
        if device.type != "cpu":
            return self.fresh_mask(dtype, device)
        window = None if self.anchored else self.window
        start = self.total - self.rows - self.first
        reach = max(SHORTEST_REACH, 1 << (start - 1).bit_length()) if start else SHORTEST_REACH
        return _strip(self.rows, groups, window, reach, dtype, device)[:, reach - start :]

    def fresh_mask(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The mask `[rows, total - first]` of causal rows in an allocation of its own, to be aligned: fused
        attention on a GPU reads masks 16 bytes at a time. Not cached, as long masks would fill a GPU."""
        start = self.total - self.rows - self.first
        mask = torch.full((self.rows, start + self.rows), float("-inf"), dtype=dtype, device=device)
        mask.triu_(start + 1)
        if self.window is not None and not self.anchored:
            mask += torch.full_like(mask, float("-inf")).tril_(start - self.window)
        return mask


@lru_cache(maxsize=32)
def _strip(
    rows: int, groups: int, window: int | None, reach: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The mask of `rows` rows after `reach` earlier keys; cut on the left, it is that after fewer keys."""
    with torch.inference_mode(False):  # kept for later passes, which may want gradients
        own = torch.arange(reach, reach + rows, device=device)[:, None]
        keys = torch.arange(reach + rows, device=device)
        hidden = keys > own
        if window is not None:
            hidden |= keys <= own - window
        mask = torch.zeros(rows, reach + rows, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
        return mask.repeat_interleave(groups, 0)
