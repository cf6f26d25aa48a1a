"""Which keys the newest rows of a sequence see, as additive masks."""

from __future__ import annotations

import torch
from torch import Tensor


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

    @property
    def triangular(self) -> bool:
        """Whether row i sees exactly the keys up to i, as in a prompt's first part: that needs no mask."""
        slides = self.window is not None and not self.anchored and self.window < self.rows
        return self.causal and self.rows == self.total and not slides

    def piece(self, start: int, stop: int) -> Visible:
        """Visibility of rows start .. stop - 1 alone; if causal, its `total` excludes the keys after them."""
        total = self.total - self.rows + stop if self.causal else self.total
        window = self.window
        # An anchored window counts from this piece's first row, so it reaches farther back.
        if self.anchored and window is not None:
            window += (total - (stop - start)) - (self.total - self.rows)
        return Visible(stop - start, total, self.causal, window, self.anchored)

    def mask(self, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """The additive mask `[rows, total - first]`, or None where nothing is hidden, or only what
        `triangular` says.

        In an allocation of its own, to be aligned: fused attention on a GPU reads masks 16 bytes at a time.
        """
        if not self.causal or self.rows == 1 or self.triangular:
            return None
        before = self.total - self.rows - self.first
        mask = torch.full((self.rows, before + self.rows), float("-inf"), dtype=dtype, device=device)
        mask.triu_(before + 1)
        if self.window is not None and not self.anchored:
            mask += torch.full_like(mask, float("-inf")).tril_(before - self.window)
        return mask
