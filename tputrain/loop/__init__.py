"""The parts of the training loop that `tputrain.trainer` puts together."""
