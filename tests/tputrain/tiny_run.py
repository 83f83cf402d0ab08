"""A recipe that runs in a second, its text, and the run that it leads to."""

import os
from pathlib import Path

from tputrain.cli import main

RECIPE = """
device: cpu
model:
  {name: llama-5m, vocab_size: 300, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1,
   num_attention_heads: 2, num_key_value_heads: 1, head_dim: 8}
data: {files: text.txt, vocab_size: 280, sequence_length: 16, cache_dir: cache}
batch: {tokens: 128, sequences: 4}
trainer: {steps: 4, evaluate_every: 2, evaluate_batches: 2}
checkpoint: {every: 2}
sample: {max_new_tokens: 4}
"""


def finish_a_run(directory: Path) -> Path:
    """Write `tiny.yaml` and its text into `directory`, and train it to its end: `runs/tiny`."""
    (directory / "tiny.yaml").write_text(RECIPE)
    (directory / "text.txt").write_text("def add(first, second):\n    return first + second\n" * 100)
    before = Path.cwd()
    os.chdir(directory)
    try:
        assert main(["run", "tiny.yaml"]) == 0
    finally:
        os.chdir(before)
    return directory
