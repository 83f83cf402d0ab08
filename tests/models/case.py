"""A model to train on both devices, and the batches it is trained on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One row of the list.

    `model()` makes the model on the CPU with random weights; called with a batch as keyword arguments it
    returns its loss, 0-d. `batch(generator)` draws one batch on the CPU, of the same shapes every time.
    """

    name: str
    family: str
    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]


class LossOf(nn.Module):
    """A model that computes its own loss, as those of transformers do: the loss alone."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__()
        self.model = model
        self.options = options

    def forward(self, **batch: Tensor) -> Tensor:
        return self.model(**batch, **self.options).loss


class WithLoss(nn.Module):
    """A model of `inputs` and a loss of (its output, `target`)."""

    def __init__(self, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, target: Tensor, **inputs: Tensor) -> Tensor:
        return self.loss(self.model(**inputs), target)
