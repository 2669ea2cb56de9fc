"""Checkpoints of a run: request, capture, write, discover and restore them."""
