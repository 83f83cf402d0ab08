"""Training steps of transformers' models on packed documents, compiled for a TPU chip.

Run as a process of its own: it loads libtpu. Prints as JSON, for each model and length, the bytes of
temporary memory and the number of attention kernels in the program. `python -m tests.tpu.packed_documents
qwen3 8192` compiles this model and these lengths instead.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import torch

from tests.benchmarks import torch_step
from tpu_backend import ahead_of_time, hlo
from tputrain.models.huggingface import build_huggingface

CHIP = "v6e:1x1"
LENGTHS = (1024, 2048)
VOCABULARY = 256  # little beside the layers
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 32_768,
}


def program_of(kind: str, length: int) -> Any:
    """A whole training step with AdamW, on a sequence of two documents, compiled."""
    model = build_huggingface({"model_type": kind, **SIZES}).to(torch.bfloat16)
    batch = torch_step.llama_batch(replace(torch_step.LLAMA, vocab_size=VOCABULARY), 1, length)
    step = torch_step.TrainingStep(model, torch_step.llama_loss, batch, "tpu")
    step()  # AdamW makes its state
    ahead_of_time.recorded()
    step()
    segment = max(ahead_of_time.recorded(), key=lambda each: len(each["tape"]))
    return ahead_of_time.compile_for(CHIP, segment)


def main(kinds: tuple[str, ...], lengths: tuple[int, ...]) -> None:
    ahead_of_time.start(CHIP)
    found = []
    for kind in kinds:
        for length in lengths:
            compiled = program_of(kind, length)
            computations = hlo.program(compiled.as_text()).computations.values()
            kernels = [each for some in computations for each in some if each.attention_kernel is not None]
            found.append(
                {
                    "model": kind,
                    "length": length,
                    "temporaries": compiled.memory_analysis().temp_size_in_bytes,
                    "kernels": len(kernels),
                }
            )
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    given = sys.argv[1:]
    main((given[0],) if given else ("llama", "qwen3"), tuple(map(int, given[1:])) or LENGTHS)
