"""How long something takes, in words."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Hours and minutes, or minutes and seconds."""
    whole = max(0, round(seconds))
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"
