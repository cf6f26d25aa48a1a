"""The Gemma 4 draft: the same block and heads on layers of the target's kind."""
