"""What a script compiles whose batches change size and length, that prints tensors and picks by a mask.

Three passes over the same batches: each distinct shape costs its programs in the first pass, and nothing in
the passes after it.
"""

import contextlib
import io
import sys

import torch
from torch import nn

from tests.benchmarks import torch_step
from tests.benchmarks.bars import Row, print_table
from tests.benchmarks.steady_state import CONFIG, Counts

LENGTHS, BATCH_SIZES = (24, 32, 48), (4, 4, 3)  # the last batch of a pass is a part of one
PASSES = 3


def train_pass(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for length in LENGTHS:
        for number, size in enumerate(BATCH_SIZES):
            arrays = torch_step.llama_batch(CONFIG, size, length, seed=number)
            batch = tuple(torch.from_numpy(array).to("tpu") for array in arrays)
            loss = torch_step.llama_loss(model, batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            with contextlib.redirect_stdout(io.StringIO()):
                print(loss, batch[0][0, : size + 3])


def rows() -> list[Row]:
    with torch.tpu.eager_mode("fused"):
        model = torch_step.llama(CONFIG).to("tpu")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        counts = Counts()
        compilations = []
        for _ in range(PASSES):
            train_pass(model, optimizer)
            compilations.append(counts.since()["compilations"])
        values = torch.randn(1000).to("tpu")
        torch.tpu.synchronize()
        counts.since()
        for quantile in range(1, 40):
            values[values > torch.special.ndtri(torch.tensor(quantile / 40)).item()].cpu()
        picked = counts.since()
    shapes = len(LENGTHS) * len(set(BATCH_SIZES))
    steps = len(LENGTHS) * len(BATCH_SIZES)
    return [
        Row(
            "changing shapes: compilations in the first pass, a distinct shape",
            compilations[0] / shapes,
            "<=",
            2,
            f"{compilations[0]:.0f} for {shapes} shapes in {steps} steps, each with two prints",
        ),
        Row(
            "changing shapes: compilations in later passes",
            sum(compilations[1:]),
            "==",
            0,
            f"{PASSES - 1} passes of {steps} steps",
        ),
        Row(
            "boolean indexing: compilations for 39 numbers of picked elements",
            picked["compilations"],
            "<=",
            12,
            f"{picked['host_reads']:.0f} host reads, one of them the script's own for each",
        ),
    ]


if __name__ == "__main__":
    sys.exit(not print_table(rows()))
