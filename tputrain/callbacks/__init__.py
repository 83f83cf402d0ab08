"""What happens beside the training loop, at a few fixed moments of it."""
