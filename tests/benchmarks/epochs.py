"""What 200 steps compile: a schedule, accumulation, evaluations and a partial last batch, in ten epochs.

Bars: nothing after the first epoch, and no two compilations of the same operations on the same shapes.
"""

import sys
from collections import Counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.benchmarks.bars import Row, print_table
from tests.tputrain.kept_records import KeptRecords
from tputrain import ExecutionConfig, LogConfig, RunConfig, ScheduleConfig, Trainer, TrainerConfig

STEPS, EPOCH, ACCUMULATE, SAMPLES, BATCH = 200, 20, 2, 39 * 8 + 3, 8  # of 40 batches the last has 3 samples


def dataset(seed: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(SAMPLES, 16, generator=generator)
    labels = torch.randint(10, (SAMPLES,), generator=generator)
    return list(zip(images.split(BATCH), labels.split(BATCH), strict=True))


def form_rows(form: str) -> list[Row]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 10))
    records = KeptRecords()
    programs_before = len(torch.tpu.compilations())
    compiled_before = torch.tpu.compile_stats()["compilations"]
    Trainer(
        model,
        RunConfig(
            device="tpu",
            trainer=TrainerConfig(steps=STEPS, accumulate=ACCUMULATE, evaluate_every=25),
            schedule=ScheduleConfig(name="cosine", warmup_steps=20),
            execution=ExecutionConfig(train=form, validate=form),
            log=LogConfig(every=10, progress="none"),
        ),
        train_loader=dataset(1),
        val_loader=dataset(2),
        loss_fn=F.cross_entropy,
        loggers=[records],
    ).fit()
    late = [record["step"] for record in records.steps if record["step"] > EPOCH and record["compilations"]]
    programs = [str(program.operations) for program in torch.tpu.compilations()[programs_before:]]
    total = torch.tpu.compile_stats()["compilations"] - compiled_before
    what = f"{STEPS} steps, {form}"
    return [
        Row(
            f"{what}: steps after the first epoch that compile",
            len(late),
            "==",
            0,
            f"steps {late}" if late else "",
        ),
        Row(f"{what}: programs", total, "<=", 8, f"{len(Counter(programs))} sequences of operations"),
    ]


def rows() -> list[Row]:
    return [*form_rows("fused"), *form_rows("compile")]


if __name__ == "__main__":
    sys.exit(not print_table(rows()))
