"""Causal models that only transformers knows, as targets. transformers is imported when such a model is
loaded, never before."""
