"""Whether what a caller put together belongs together."""

from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from tputrain.announce import say
from tputrain.errors import UserError


def check_ownership(
    model: nn.Module, loss_fn: Any, optimizer: torch.optim.Optimizer, lr_scheduler: Any
) -> None:
    """Raise UserError unless `optimizer` trains `model`, and `lr_scheduler` belongs to that optimizer.

    Parameters of `loss_fn` that want gradients and that nothing trains are said in one line.
    """
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
    if isinstance(loss_fn, nn.Module):
        _say_untrained(loss_fn, own)


def _say_untrained(loss_fn: nn.Module, own: set[int]) -> None:
    """`own`: the ids of the model's parameters, the only ones that an optimizer can have here."""
    names = [name for name, each in loss_fn.named_parameters() if each.requires_grad and id(each) not in own]
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        say(
            f"note: loss_fn has the parameter {names[0]}{more}: not trained and in no checkpoint; have the "
            "model hold loss_fn to train it, else loss_fn.requires_grad_(False)"
        )
