"""What must be zero, or one, in every step once training runs: counted, not timed.

* exactly one segment a step, with accumulation over 4 micro-batches, clipping and a schedule too;
* no read from the device between log steps, and no compilation after step 3;
* printing a tensor compiles nothing and reads the device once, whatever its shape;
* no operator falls back to the CPU.
"""

import dataclasses
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.benchmarks import torch_step
from tests.benchmarks.bars import Row, print_table

# Small, because counts are the same at every size; the operators are those of every Llama.
CONFIG = dataclasses.replace(
    torch_step.LLAMA, vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=16
)
STEPS, WARM_STEPS, LOG_EVERY = 16, 3, 5
SHAPES = ((), (3,), (4, 5), (2, 3, 4), (2000,))  # the last is one that PyTorch prints abridged


class Counts:
    """The device's counters since the last time they were asked for."""

    def __init__(self) -> None:
        self.last = dict(torch.tpu.compile_stats())

    def since(self) -> dict[str, float]:
        now = dict(torch.tpu.compile_stats())
        gone = {name: now[name] - self.last[name] for name in now}
        self.last = now
        return gone


def plain_step() -> Callable[[], Tensor]:
    batch = torch_step.llama_batch(CONFIG, 4, 32)
    return torch_step.TrainingStep(torch_step.llama(CONFIG), torch_step.llama_loss, batch, "tpu")


def accumulating_step(micro_batches: int = 4) -> Callable[[], Tensor]:
    """A step over several micro-batches, clipped, with the learning rate of a PyTorch schedule."""
    model = torch_step.llama(CONFIG).to("tpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 8))
    batches = [
        tuple(torch.from_numpy(array).to("tpu") for array in torch_step.llama_batch(CONFIG, 4, 32, seed=seed))
        for seed in range(micro_batches)
    ]

    def step() -> Tensor:
        losses = []
        for batch in batches:
            loss = torch_step.llama_loss(model, batch) / micro_batches
            loss.backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        return torch.stack(losses).sum()

    return step


def steps_rows(name: str, step: Callable[[], Tensor]) -> list[Row]:
    """Run the step a few times, reading its loss at log steps only, and count."""
    counts = Counts()
    segments, compilations, reads = [], [], []
    for number in range(1, STEPS + 1):
        loss = step()
        torch.tpu.flush()
        done = counts.since()
        if number > WARM_STEPS:
            segments.append(done["segments_run"])
            compilations.append(done["compilations"])
            reads.append(done["host_reads"])
        if number % LOG_EVERY == 0:
            loss.item()
            logged = counts.since()
            if number > WARM_STEPS:
                compilations.append(logged["compilations"])
    worst = max(segments, key=lambda count: abs(count - 1))
    steps = f"steps {WARM_STEPS + 1} to {STEPS}"
    return [
        Row(f"{name}: segments a step", worst, "==", 1, f"{steps}: {sorted(set(segments))}"),
        Row(f"{name}: compilations after step {WARM_STEPS}", sum(compilations), "==", 0, steps),
        Row(f"{name}: host reads between log steps", sum(reads), "==", 0, f"{steps}, log every {LOG_EVERY}"),
    ]


def print_rows() -> list[Row]:
    tensors = [torch.randn(shape).to("tpu") for shape in SHAPES]
    torch.tpu.synchronize()
    compilations, reads = [], []
    counts = Counts()
    for tensor in tensors:
        repr(tensor)
        done = counts.since()
        compilations.append(done["compilations"])
        reads.append(done["host_reads"])
    shapes = ", ".join(str(shape) for shape in SHAPES)
    return [
        Row("print of a tensor: compilations", max(compilations), "==", 0, f"shapes {shapes}"),
        Row("print of a tensor: host reads", max(reads), "==", 1, f"each of {reads}"),
    ]


def fallback_row(name: str) -> Row:
    fallbacks = torch.tpu.fallback_stats()
    detail = ", ".join(f"{name} x{count}" for name, count in sorted(fallbacks.items()))
    return Row(name, len(fallbacks), "==", 0, detail)


def rows() -> list[Row]:
    with torch.tpu.eager_mode("fused"):
        return [
            *steps_rows("Llama step", plain_step()),
            *steps_rows("accumulation 4, clipping, schedule", accumulating_step()),
            *print_rows(),
            fallback_row("operators that fell back to the CPU"),
        ]


if __name__ == "__main__":
    sys.exit(not print_table(rows()))
