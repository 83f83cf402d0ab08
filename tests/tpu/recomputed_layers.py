"""A Llama's training step with and without activation checkpointing, compiled for one TPU chip.

Run as a process of its own: it loads libtpu.  Prints the bytes of temporary memory of each program as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import sys

import torch

from tests.benchmarks import torch_step
from tests.tpu import training_steps
from tests.tpu.chips import target
from tpu_backend.runtime import compiler

LLAMA = dataclasses.replace(
    training_steps.LLAMA,
    hidden_size=128,
    intermediate_size=512,
    num_hidden_layers=6,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=1024,
)
BATCH, LENGTH = 4, 1024


def main() -> None:
    training_steps.record_segments()
    torch.set_float32_matmul_precision("medium")  # six passes take several times as long to compile
    found = {}
    for recomputes in (False, "layers", "products", "offload"):
        config = dataclasses.replace(LLAMA, activation_checkpointing=recomputes)
        description = training_steps.largest_segment(
            torch_step.llama(config), torch_step.llama_loss, torch_step.llama_batch(config, BATCH, LENGTH)
        )
        program, _ = compiler.lower_segment(description, target("v5e"))
        memory = program.compile().memory_analysis()
        found[recomputes or "kept"] = memory.temp_size_in_bytes
        if recomputes == "offload":
            found["host"] = memory.host_temp_size_in_bytes
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
