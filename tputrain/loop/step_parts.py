"""What a step is made of, and what it gives."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tputrain.config import TrainerConfig
from tputrain.execution import Execution
from tputrain.loop.logged import LoggedValues
from tputrain.loss import LossFunction
from tputrain.parallel.world import World


class StepParts(NamedTuple):
    """The one argument of a step's class."""

    model: nn.Module
    """On its device, and laid out over the ranks."""
    optimizer: torch.optim.Optimizer
    loss_fn: LossFunction | None
    device: torch.device
    world: World
    execution: Execution
    logged: LoggedValues
    limits: TrainerConfig
    """Of gradients: `max_grad_norm` and `max_grad_value`."""


class StepResult(NamedTuple):
    """Scalar tensors on the device."""

    loss: Tensor
    """The mean over all labels of the step."""
    grad_norm: Tensor
    """Of all gradients together, before clipping."""
    logged: Mapping[str, Tensor | float] = {}
    """What `trainer.log` was given in the step."""


class StepHooks(NamedTuple):
    """What is called at three moments of a step. None of them may read a value."""

    before_backward: tuple[Callable[[Tensor], None], ...] = ()
    """With the loss of a micro-batch."""
    after_backward: tuple[Callable[[], None], ...] = ()
    """After that of each micro-batch."""
    before_optimizer_step: tuple[Callable[[], None], ...] = ()
    """Gradients are clipped."""
