"""Many ranks: one process a device, each with its part of the weights and of the batch."""
