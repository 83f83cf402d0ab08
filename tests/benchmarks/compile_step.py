"""A training step by `torch.compile`, and in fused mode, against the hand-written JAX step.

Bars: both at most 1.05x JAX's time for the Llama and the MLP; on the compile path the host is busy for at
most 200 µs a step of the Llama.
"""

import sys
import time
from collections.abc import Callable

import jax
import torch
from torch import nn

from tests.benchmarks import jax_reference, torch_step
from tests.benchmarks.bars import Row, print_table
from tests.benchmarks.interleaved import interleave
from tests.benchmarks.jax_target import JaxSteps

JaxLoss = Callable[[jax_reference.Params, jax_reference.Batch], jax.Array]


def step_rows(
    name: str,
    make_model: Callable[[], nn.Module],
    loss: torch_step.Loss,
    jax_loss: JaxLoss,
    batch: torch_step.Batch,
    calls: int,
    rounds: int,
) -> list[Row]:
    def steps(compiled: bool) -> torch_step.DeviceSteps:
        return torch_step.DeviceSteps(
            torch_step.TrainingStep(make_model(), loss, batch, "tpu", compiled), "fused"
        )

    targets = {
        "compile": steps(True),
        "fused": steps(False),
        "jax": JaxSteps(jax_reference.initial_state(make_model()), jax_loss, batch),
    }
    timings = interleave(targets, calls=calls, rounds=rounds)
    reference = timings.pop("jax")
    return [
        Row(
            f"{name} step: {form} / JAX",
            timing.minimum / reference.minimum,
            "<=",
            1.05,
            f"{timing} / {reference}",
        )
        for form, timing in timings.items()
    ]


def host_row(rounds: int = 60) -> Row:
    """How long the host is busy with a step that it dispatches to an idle device."""
    model = torch_step.llama()
    step = torch_step.TrainingStep(
        model, torch_step.llama_loss, torch_step.llama_batch(), "tpu", compiled=True
    )
    torch_step.DeviceSteps(step, "fused")(5)
    seconds = []
    for _ in range(rounds):
        torch.tpu.synchronize()
        start = time.perf_counter()
        step()
        torch.tpu.flush()
        seconds.append(time.perf_counter() - start)
    torch.tpu.synchronize()
    best = min(seconds) * 1e6
    num_buffers = 3 * len(list(model.parameters())) + len(step.batch)  # parameters and two moments each
    median = sorted(seconds)[rounds // 2] * 1e6
    detail = f"{best / num_buffers:.2f} µs a buffer, {num_buffers} of them; median {median:.0f} µs"
    return Row("Llama step by torch.compile: host time, µs", best, "<=", 200, detail)


def rows() -> list[Row]:
    return [
        host_row(),
        *step_rows(
            "MLP",
            torch_step.mlp,
            torch_step.mlp_loss,
            jax_reference.mlp_loss,
            torch_step.mlp_batch(),
            calls=20,
            rounds=30,
        ),
        *step_rows(
            "Llama",
            torch_step.llama,
            torch_step.llama_loss,
            jax_reference.llama_loss(torch_step.LLAMA),
            torch_step.llama_batch(),
            calls=3,
            rounds=7,
        ),
    ]


if __name__ == "__main__":
    sys.exit(not print_table(rows()))
