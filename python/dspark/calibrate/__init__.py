"""Sequential temperature scaling of a draft's confidence head (paper, section 3.2.1)."""
