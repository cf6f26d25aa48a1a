"""Gemma 4: dense text models whose sliding and full layers have sizes and rotations of their own."""
