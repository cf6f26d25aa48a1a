"""The hybrid targets (Qwen3.5 and its successors): Gated-DeltaNet layers, with full attention every few."""
