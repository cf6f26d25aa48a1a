"""How those who wait are told how far something is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with what is done, how much of it is, and how much it will be."""
