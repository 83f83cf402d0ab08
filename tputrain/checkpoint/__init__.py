"""Runs on disk: what a checkpoint holds, how it is sealed, and which is the newest that can be trusted."""
