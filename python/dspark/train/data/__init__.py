"""Conversations to train on: read, made by the target, filtered, split."""
