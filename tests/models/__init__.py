"""Models nobody here wrote, trained on tpu and on cpu from the same weights: `python -m tests.models`."""
