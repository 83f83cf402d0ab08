"""A training step of the 5M Llama (8 sequences of 128 tokens, vocabulary 4096): compute counts.

Bar: fused at most 1.15x the time of the hand-written JAX step.
"""

import sys

from tests.benchmarks import jax_reference, torch_step
from tests.benchmarks.bars import Row, print_table
from tests.benchmarks.interleaved import interleave
from tests.benchmarks.jax_target import JaxSteps


def rows(rounds: int = 7) -> list[Row]:
    batch = torch_step.llama_batch()
    step = torch_step.TrainingStep(torch_step.llama(), torch_step.llama_loss, batch, "tpu")
    targets = {
        "fused": torch_step.DeviceSteps(step, "fused"),
        "jax": JaxSteps(
            jax_reference.initial_state(torch_step.llama()), jax_reference.llama_loss(torch_step.LLAMA), batch
        ),
    }
    timings = interleave(targets, calls=3, rounds=rounds)
    fused, jax = timings["fused"], timings["jax"]
    return [Row("Llama step: fused / JAX", fused.minimum / jax.minimum, "<=", 1.15, f"{fused} / {jax}")]


if __name__ == "__main__":
    sys.exit(not print_table(rows()))
