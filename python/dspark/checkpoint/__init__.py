"""Reading checkpoints from disk: configs, tensors, and what they are."""
