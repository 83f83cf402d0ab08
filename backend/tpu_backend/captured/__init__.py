"""`torch.tpu.capture`: a step that is recorded and then launched again without its Python."""
