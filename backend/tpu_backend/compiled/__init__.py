"""The compile path: `torch.compile(..., backend="tpu")` makes each graph one operation of the op stream."""
