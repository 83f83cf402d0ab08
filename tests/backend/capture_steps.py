"""A step to capture: a small model that drops out, its optimizer, and batches for it."""

import torch
import torch.nn.functional as F
from torch import nn


def replays() -> int:
    return torch.tpu.compile_stats()["replays"]


class Setup:
    """A small model that drops out, an optimizer, and a step of both."""

    def __init__(
        self, form: str = "fused", optimizer: str = "sgd", norm: bool = False, is_deep: bool = False
    ):
        """`is_deep`: of so many buffers that a thread launches the step's program."""
        torch.manual_seed(0)
        middle = [nn.BatchNorm1d(16) if norm else nn.Identity()]
        middle += [nn.Linear(16, 16) for _ in range(8 if is_deep else 0)]
        self.model = nn.Sequential(
            nn.Linear(8, 16), *middle, nn.GELU(), nn.Dropout(0.25), nn.Linear(16, 4)
        ).to("tpu")
        parameters = self.model.parameters()
        self.optimizer = (
            torch.optim.AdamW(parameters, lr=1e-2, fused=True)
            if optimizer == "adamw"
            else torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)
        )
        self.called = torch.compile(self.model) if form == "compile" else self.model
        torch.tpu.manual_seed_all(7)

    def step(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(self.called(inputs), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def state(self) -> list[torch.Tensor]:
        kept = [*self.model.parameters(), *self.model.buffers()]
        kept += [
            tensor
            for state in self.optimizer.state.values()
            for tensor in state.values()
            if tensor is not None
        ]
        return [tensor.detach().cpu() for tensor in kept]


def batch(number: int, size: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(size, 8, generator=generator)
    return inputs.to("tpu"), torch.randint(0, 4, (size,), generator=generator).to("tpu")


def run(setup: Setup, step, numbers, size: int = 6) -> list[torch.Tensor]:
    """Steps with another learning rate each."""
    losses = []
    for number in numbers:
        setup.set_rate(1e-2 / (1 + number))
        losses.append(step(*batch(number, size)))
        torch.tpu.flush()
    return losses
