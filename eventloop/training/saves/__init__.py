"""The checkpoints of a run: requested, captured, written, found and restored."""
