"""Training steps, recorded on the device and compiled as whole segments for TPU chips.

Run as a process of its own: it loads libtpu.  Prints one JSON object: for each step and chip the number of
operations in the segment and what the compiler says about it (null: it compiles).
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import nn

from tests.benchmarks import torch_step
from tests.tpu.chips import TOPOLOGIES, target
from tpu_backend.runtime import compiler
from tpu_backend.runtime.signature import entries
from tputrain.models.llama import LlamaConfig

LLAMA = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=64,
)

segments: list[dict[str, Any]] = []
_compile_here = compiler.compile_segment


def _record(description: dict[str, Any], may_wait: bool) -> compiler.Executable:
    segments.append(description)
    return _compile_here(description, may_wait)


def record_segments() -> None:
    """Before the device's first use, which hands the compiler to the recorder."""
    compiler.compile_segment = _record


def largest_segment(model: nn.Module, loss: torch_step.Loss, batch: torch_step.Batch) -> dict[str, Any]:
    """The segment of a whole training step with AdamW, once its state is there."""
    step = torch_step.TrainingStep(model, loss, batch, "tpu")
    with torch.tpu.eager_mode("fused"):  # one program from the first step on
        for _ in range(2):
            segments.clear()
            step()
            torch.tpu.synchronize()
    return max(segments, key=lambda description: len(description["tape"]))


def main() -> None:
    record_segments()
    steps = {
        "mlp": largest_segment(torch_step.mlp(), torch_step.mlp_loss, torch_step.mlp_batch()),
        "llama": largest_segment(
            torch_step.llama(LLAMA), torch_step.llama_loss, torch_step.llama_batch(LLAMA, 2, 64)
        ),
    }
    found = []
    for name, description in steps.items():
        for chip in TOPOLOGIES:
            problem = None
            try:
                program, _ = compiler.lower_segment(description, target(chip))
                program.compile()
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            num_ops = len(list(entries(description["tape"])))
            found.append({"step": name, "chip": chip, "num_ops": num_ops, "problem": problem})
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
