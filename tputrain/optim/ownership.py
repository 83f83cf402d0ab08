"""Whether what a caller put together belongs together."""

from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from tputrain.errors import UserError


def check_ownership(model: nn.Module, optimizer: torch.optim.Optimizer, lr_scheduler: Any) -> None:
    """Raise UserError unless `optimizer` trains `model`, and `lr_scheduler` belongs to that optimizer."""
    own = {id(parameter) for parameter in model.parameters()}
    for group in optimizer.param_groups:
        if any(id(parameter) not in own for parameter in group["params"]):
            device = str(next(model.parameters()).device.type)
            raise UserError(
                f"the optimizer holds a tensor that is no parameter of the model on {device}: "
                f"build it from model.parameters() after model.to({device!r})"
            )
    if isinstance(lr_scheduler, LRScheduler) and lr_scheduler.optimizer is not optimizer:
        raise UserError("the lr_scheduler belongs to another optimizer: give the Trainer that one too")
