"""Reading checkpoints from disk: configs, tensors, and what they are. Only `load` needs torch."""

from dspark.checkpoint.describe import inspect_checkpoint

__all__ = ["inspect_checkpoint"]
