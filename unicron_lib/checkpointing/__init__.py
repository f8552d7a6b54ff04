"""Checkpoints on an object store: visible only when complete and verified."""
