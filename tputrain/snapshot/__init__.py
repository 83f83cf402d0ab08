"""The state of a training: taken from model and optimizer, written by a thread, read from a checkpoint."""
