"""A training step of an MLP (784-512-512-10, batch 128): about 3 ms, so the host's time counts.

A step this short is noisy: there are many rounds.  Bars: fused at least 1.5x as fast as strict, and at most
1.3x the time of the hand-written JAX step.
"""

import sys

from tests.benchmarks import jax_reference, torch_step
from tests.benchmarks.bars import Row, print_table
from tests.benchmarks.interleaved import interleave
from tests.benchmarks.jax_target import JaxSteps


def rows(rounds: int = 50) -> list[Row]:
    batch = torch_step.mlp_batch()

    def device_steps(mode: str) -> torch_step.DeviceSteps:
        step = torch_step.TrainingStep(torch_step.mlp(), torch_step.mlp_loss, batch, "tpu")
        return torch_step.DeviceSteps(step, mode)

    targets = {
        "fused": device_steps("fused"),
        "strict": device_steps("strict"),
        "jax": JaxSteps(jax_reference.initial_state(torch_step.mlp()), jax_reference.mlp_loss, batch),
    }
    timings = interleave(targets, calls=20, rounds=rounds)
    fused, strict, jax = timings["fused"], timings["strict"], timings["jax"]
    return [
        Row("MLP step: strict / fused", strict.minimum / fused.minimum, ">=", 1.5, f"{strict} / {fused}"),
        Row("MLP step: fused / JAX", fused.minimum / jax.minimum, "<=", 1.3, f"{fused} / {jax}"),
    ]


if __name__ == "__main__":
    sys.exit(not print_table(rows()))
