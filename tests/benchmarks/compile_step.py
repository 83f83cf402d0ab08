"""A training step by `torch.compile`, captured, and in fused mode, against the hand-written JAX step.

Bars: all at most 1.05x JAX's time for the Llama and the MLP; on the compile path the host is busy for at
most 200 µs a step of the Llama, which is asked of the captured step: without it Dynamo and the optimizer's
Python alone take more. On a CPU the step itself empties the caches that the host's next one needs, so the
host's time is also measured for a Llama of as many buffers that computes next to nothing, and both beside
what JAX's own call takes. A captured step's program is launched by another thread, which that time does not
count; JAX's own call is the measure of it.

The MLP's step is so short that the host's work shows in it where XLA computes on every core, as it does not
on a device of its own. So it is measured twice: as it comes, and with one core for XLA, on both sides, and
another for the host. Beside both stands what a device that costs the host nothing would have: JAX's step
with a loop between its calls that keeps the thread as long as PyTorch's own work for such a step takes alone,
on CPU tensors of a few numbers. A loop leaves the caches alone, as PyTorch's work does not.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from statistics import median

import jax
import numpy as np
import torch
from torch import nn

from tests.backend.fresh_process import found_by
from tests.benchmarks import jax_reference, torch_step
from tests.benchmarks.bars import Row, print_table
from tests.benchmarks.interleaved import interleave
from tests.benchmarks.jax_target import JaxSteps
from tputrain.models.llama import LlamaConfig

JaxLoss = Callable[[jax_reference.Params, jax_reference.Batch], jax.Array]


def step_rows(
    name: str,
    make_model: Callable[[], nn.Module],
    loss: torch_step.Loss,
    jax_loss: JaxLoss,
    batch: torch_step.Batch,
    calls: int,
    rounds: int,
    yardsticks: dict[str, Callable[[int], None]] | None = None,
) -> list[Row]:
    """`yardsticks`: by form, a target that its time is also told beside."""
    yardsticks = yardsticks or {}

    targets = torch_step.in_each_form(make_model, loss, batch)
    timings = interleave(
        {
            **targets,
            "jax": JaxSteps(jax_reference.initial_state(make_model()), jax_loss, batch),
            **{f"{form}'s yardstick": yardstick for form, yardstick in yardsticks.items()},
        },
        calls=calls,
        rounds=rounds,
    )
    reference = timings["jax"]

    def beside_yardstick(form: str) -> str:
        if form not in yardsticks:
            return ""
        yardstick = timings[f"{form}'s yardstick"]
        ratio = yardstick.minimum / reference.minimum
        return f"; JAX with {yardsticks[form]} for PyTorch's own work {ratio:.3f}: {yardstick}"

    return [
        Row(
            f"{name} step: {form} / JAX",
            timings[form].minimum / reference.minimum,
            "<=",
            1.05,
            f"{timings[form]} / {reference}{beside_yardstick(form)}",
        )
        for form in targets
    ]


def seconds_of_pytorch(compiled: bool) -> float:
    """What PyTorch's own work for a step of the MLP takes the host at best, nothing else running; the CPU's
    kernels for a few numbers are in it."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    batch = np.zeros((2, 2), np.float32), np.zeros(2, np.int64)
    step = torch_step.TrainingStep(model, torch_step.mlp_loss, batch, "cpu", compiled=compiled)
    if not compiled:  # on a device PyTorch's default is this
        step.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    times = []
    for _ in range(1000):
        start = time.thread_time()
        step()
        times.append(time.thread_time() - start)
    return min(times)


class JaxBesideALoop:
    """A target for `interleave`: JAX's steps, and between them a loop of `seconds` of the thread's time."""

    def __init__(self, jax_steps: JaxSteps, seconds: float) -> None:
        self.jax_steps = jax_steps
        self.seconds = seconds

    def __call__(self, calls: int) -> None:
        for _ in range(calls):
            end = time.thread_time() + self.seconds
            while time.thread_time() < end:
                pass
            self.jax_steps.dispatch()
        self.jax_steps(0)

    def __str__(self) -> str:
        return f"a loop of {self.seconds * 1e6:.0f} µs"


def mlp_rows(name: str) -> list[Row]:
    def jax_steps() -> JaxSteps:
        return JaxSteps(
            jax_reference.initial_state(torch_step.mlp()), jax_reference.mlp_loss, torch_step.mlp_batch()
        )

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # OpenMP's would spin beside XLA's
    try:
        return step_rows(
            name,
            torch_step.mlp,
            torch_step.mlp_loss,
            jax_reference.mlp_loss,
            torch_step.mlp_batch(),
            calls=20,
            rounds=150,  # so short a step that a neighbour of the machine spoils most of them
            yardsticks={
                "compile": JaxBesideALoop(jax_steps(), seconds_of_pytorch(compiled=True)),
                "fused": JaxBesideALoop(jax_steps(), seconds_of_pytorch(compiled=False)),
            },
        )
    finally:
        torch.set_num_threads(threads)


def in_a_process_with_one_core_for_xla(name: str) -> list[Row]:
    """`mlp_rows` where XLA:CPU has one thread to compute with."""
    return [Row(**row) for row in found_by("tests.benchmarks.compile_step", name, NPROC="1")]


# As many buffers as the Llama of the bars, and as few operations as may be.
SMALL = replace(torch_step.LLAMA, hidden_size=32, intermediate_size=32, vocab_size=64)


def host_rows(name: str, config: LlamaConfig, rounds: int = 10, calls: int = 12) -> list[Row]:
    """How long the thread that trains is busy with a step that it dispatches to an idle device."""
    model, batch = torch_step.llama(config), torch_step.llama_batch(config)
    jax_steps = JaxSteps(jax_reference.initial_state(model), jax_reference.llama_loss(config), batch)
    num_buffers = 3 * len(list(model.parameters())) + len(batch)  # parameters and two moments each
    dispatches: dict[str, Callable[[], None]] = {"JAX": jax_steps.dispatch}
    for form in ("captured", "compiled"):
        step = torch_step.TrainingStep(
            torch_step.llama(config), torch_step.llama_loss, batch, "tpu", **{form: True}
        )
        dispatches[form] = torch_step.DeviceSteps(step, "fused").dispatch
    microseconds: dict[str, list[float]] = {form: [] for form in dispatches}
    for turn in range(rounds + 1):
        for form, dispatch in dispatches.items():
            for _ in range(calls):
                torch.tpu.synchronize()
                jax.block_until_ready(jax_steps.state)
                start = time.perf_counter()
                dispatch()
                if turn > 0:  # compiled, recorded, and on their way
                    microseconds[form].append((time.perf_counter() - start) * 1e6)
    torch.tpu.synchronize()
    jax_best = min(microseconds.pop("JAX"))
    return [
        Row(
            f"{name} step, {form}: host time, µs",
            min(times),
            "<=",
            200,
            f"{min(times) / num_buffers:.2f} µs a buffer, {num_buffers} of them; median "
            f"{median(times):.0f} µs; JAX {jax_best:.0f} µs",
        )
        for form, times in microseconds.items()
    ]


def rows() -> list[Row]:
    return [
        *host_rows("Llama", torch_step.LLAMA),
        *host_rows("Llama without work", SMALL),
        *in_a_process_with_one_core_for_xla("MLP, a core for the host:"),
        *mlp_rows("MLP"),
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
    if len(sys.argv) > 1:
        print(json.dumps([asdict(row) for row in mlp_rows(sys.argv[1])]))
    else:
        sys.exit(not print_table(rows()))
