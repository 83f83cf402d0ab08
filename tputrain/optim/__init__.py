"""How parameters move: the optimizer and its learning rate."""
