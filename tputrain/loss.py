"""The scalar to minimise, wherever the model puts it."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tputrain.errors import UserError

LossFunction = Callable[[Any, Any], Tensor]


def loss_of(output: Any, target: Any, loss_fn: LossFunction | None) -> Tensor:
    """The mean loss of a batch, a scalar tensor.

    A given `loss_fn(output, target)` decides. Else the model's own loss is taken: a scalar output,
    `output["loss"]` or `output.loss`. Else the output is taken for logits and compared with the target by
    cross-entropy.
    """
    if loss_fn is not None:
        if target is None:
            raise UserError(
                "a loss_fn was given and the batch has no target: "
                "expected (input, target) or a dict with 'labels'"
            )
        return _scalar(loss_fn(output, target), "loss_fn returned")
    own = _own_loss(output)
    if own is not None:
        return own
    if isinstance(output, Tensor) and target is not None:
        # Of half precision, whose logarithms are too coarse; anything wider as it is.
        logits = output.float() if output.dtype in (torch.bfloat16, torch.float16) else output
        return _scalar(F.cross_entropy(logits, target), "cross_entropy returned")
    raise UserError(
        f"no loss: the model returned {_describe(output)} and the batch has "
        f"{'no target' if target is None else 'a target'}; return a scalar, a dict with 'loss' or an "
        "object with `.loss`, or give the Trainer a loss_fn(output, target)"
    )


def _own_loss(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output if output.dim() == 0 else None
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return None if found is None else _scalar(found, "the model's loss is")


def _scalar(value: Any, what: str) -> Tensor:
    if isinstance(value, Tensor) and value.dim() == 0:
        return value
    raise UserError(f"{what} {_describe(value)}: expected a scalar tensor (the mean over the batch)")


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
