"""The memory of a training step: live buffers and its executable's temporaries, against JAX's own analysis.

Bar: at most 1.05x of what the hand-written, donated JAX step of the same model takes, for the MLP and the
Llama, in fused mode and by `torch.compile`.
"""

import gc
import sys
from collections.abc import Callable

import jax
import torch
from torch import nn

from tests.benchmarks import jax_reference, torch_step
from tests.benchmarks.bars import Row, print_table
from tests.benchmarks.jax_target import JaxSteps

MIB = 2**20


def device_memory(
    make_model: Callable[[], nn.Module], loss: torch_step.Loss, batch: torch_step.Batch, compiled: bool
) -> tuple[int, int]:
    """Bytes of live buffers after a few steps, and of the temporaries of the hungriest executable so far."""
    gc.collect()
    baseline = torch.tpu.memory_stats()["live_bytes"]
    step = torch_step.TrainingStep(make_model(), loss, batch, "tpu", compiled)
    torch_step.DeviceSteps(step, "fused")(5)
    stats = torch.tpu.memory_stats()
    return stats["live_bytes"] - baseline, stats["executable_temp_bytes"]


def form_rows(
    name: str,
    make_model: Callable[[], nn.Module],
    torch_loss: torch_step.Loss,
    jax_loss: Callable[[jax_reference.Params, jax_reference.Batch], jax.Array],
    batch: torch_step.Batch,
) -> list[Row]:
    reference = JaxSteps(jax_reference.initial_state(make_model()), jax_loss, batch).memory()
    found = []
    for form in ("fused", "compile"):
        live, temporaries = device_memory(make_model, torch_loss, batch, form == "compile")
        ours = f"{live / MIB:.1f} MiB live + {temporaries / MIB:.1f} MiB temporaries"
        detail = f"({ours}) / {reference / MIB:.1f} MiB"
        found.append(
            Row(f"{name} memory: {form} / JAX", (live + temporaries) / reference, "<=", 1.05, detail)
        )
    return found


def rows() -> list[Row]:
    return [
        *form_rows(
            "MLP",
            torch_step.mlp,
            torch_step.mlp_loss,
            jax_reference.mlp_loss,
            torch_step.mlp_batch(),
        ),
        *form_rows(
            "Llama",
            torch_step.llama,
            torch_step.llama_loss,
            jax_reference.llama_loss(torch_step.LLAMA),
            torch_step.llama_batch(),
        ),
    ]


if __name__ == "__main__":
    sys.exit(not print_table(rows()))
