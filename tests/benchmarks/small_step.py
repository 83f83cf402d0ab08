"""A step of a small MLP (64-128-10, batch 32, AdamW): what the host does is all of it.

Bar: compiled with its loss at most 1.0x the fused step. Where the model alone is compiled, Dynamo's checks
and its way into the graph take longer than recording the three operations of the model: that ratio is told.
"""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.benchmarks.bars import Row, print_table
from tests.benchmarks.interleaved import interleave
from tests.benchmarks.torch_step import DeviceSteps


class SmallStep:
    """`compiled`: "model", "loss" (the model with it), or nothing."""

    def __init__(self, compiled: str = "") -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to("tpu")
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.batch = torch.randn(32, 64).to("tpu"), torch.randint(0, 10, (32,)).to("tpu")
        called = torch.compile(self.model) if compiled == "model" else self.model

        def loss(features: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(called(features), labels)

        self.loss = torch.compile(loss) if compiled == "loss" else loss

    def __call__(self) -> None:
        self.loss(*self.batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def rows(rounds: int = 40) -> list[Row]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # OpenMP's would spin beside XLA's
    try:
        timings = interleave(
            {
                "fused": DeviceSteps(SmallStep(), "fused"),
                "strict": DeviceSteps(SmallStep(), "strict"),
                "model": DeviceSteps(SmallStep("model"), "fused"),
                "loss": DeviceSteps(SmallStep("loss"), "fused"),
            },
            calls=50,
            rounds=rounds,
        )
    finally:
        torch.set_num_threads(threads)
    fused, strict, model, loss = (timings[name] for name in ("fused", "strict", "model", "loss"))
    others = f"the model alone {model.minimum / fused.minimum:.2f}: {model}; strict {strict}"
    return [
        Row(
            "small MLP step: compiled with its loss / fused",
            loss.minimum / fused.minimum,
            "<=",
            1.0,
            f"{loss} / {fused}; {others}",
        )
    ]


if __name__ == "__main__":
    sys.exit(not print_table(rows()))
