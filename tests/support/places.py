"""Where things lie in the repository."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
RNN_DRAFT = DATA / "qwen3" / "draft-rnn"
TINY = ROOT / "python" / "dspark" / "pretrained" / "tiny"
"""The embedded pair: its folders `target` and `draft`."""
