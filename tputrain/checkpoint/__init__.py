"""Checkpoints on disk: their files, how they are sealed, and which is the newest that can be trusted."""

CHECKPOINTS = "checkpoints"
"""Where a run keeps them: a directory in its own, and in its mirror."""
