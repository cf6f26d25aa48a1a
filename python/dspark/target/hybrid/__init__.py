"""Hybrid targets (Qwen3.5 and its successors): Gated-DeltaNet layers, with a full-attention one every few."""
