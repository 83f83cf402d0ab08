"""The scalar to minimise, wherever the model puts it."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tputrain.errors import UserError

LossFunction = Callable[[Any, Any], Tensor]


_SUM_TOLERANCE = 0.02
"""How far from 1 the sum of a row of class probabilities may be: 1,000 classes in bfloat16 are 0.003 off."""


def loss_of(
    output: Any, target: Any, loss_fn: LossFunction | None, may_be_probabilities: bool = True
) -> Tensor:
    """The mean loss of a batch, a scalar tensor.

    A given `loss_fn(output, target)` decides. Else the model's own loss is taken: a scalar output,
    `output["loss"]` or `output.loss`. Else the output is taken for logits and compared with the target by
    cross-entropy. `may_be_probabilities`: what `may_be_probabilities` says of the targets.
    """
    if loss_fn is not None:
        if target is None:
            raise UserError(
                "a loss_fn was given and the batch has no target: expected (input, target) or a dict with "
                "'labels'; without a target have the model's forward return the loss and give no loss_fn, or "
                "give step= a TrainStep with a forward of its own (docs/steps.md)"
            )
        return _scalar(loss_fn(output, target), "loss_fn returned")
    own = _own_loss(output)
    if own is not None:
        return own
    if isinstance(output, Tensor) and target is not None:
        _check_cross_entropy(output, target, may_be_probabilities)
        # Of half precision, whose logarithms are too coarse; anything wider as it is.
        logits = output.float() if output.dtype in (torch.bfloat16, torch.float16) else output
        return _scalar(F.cross_entropy(logits, target), "cross_entropy returned")
    raise UserError(
        f"no loss: the model returned {_describe(output)} and the batch has "
        f"{'no target' if target is None else 'a target'}; return a scalar, a dict with 'loss' or an "
        "object with `.loss`, or give the Trainer a loss_fn(output, target)"
    )


def expect_gradient(loss: Tensor) -> None:
    """Raise UserError where nothing can be trained by this loss."""
    if not loss.requires_grad:
        raise UserError(
            "the loss has no gradient: expected one that is computed from trainable parameters; look for "
            "detach(), torch.no_grad() or .item() in the model and the loss_fn"
        )


def may_be_probabilities(target: Any) -> bool:
    """Whether cross-entropy can take `target` for class probabilities, by its values, should it be of floats.

    Rows of zeros may be what is not to count, beside others. NaN may be one: bad steps are told elsewhere.
    """
    if not (isinstance(target, Tensor) and target.is_floating_point() and target.dim() > 0):
        return True
    sums = target.float().sum(dim=_class_dimension(target))
    is_zero = sums.abs() <= _SUM_TOLERANCE
    is_off = ((sums - 1).abs() > _SUM_TOLERANCE) & ~is_zero
    has_none = is_zero.numel() > 0 and bool(is_zero.all())
    return not (has_none or bool(is_off.any() | (target < 0).any()))


def _check_cross_entropy(output: Tensor, target: Any, may_be_probabilities: bool) -> None:
    """Raise UserError where the default loss would be nonsense: targets of floats that are no classes."""
    if not (isinstance(target, Tensor) and target.is_floating_point()):
        return
    if output.shape != target.shape:
        why = "needs class indices (int64), or a probability for each class"
    elif output.shape[_class_dimension(output)] == 1:
        why = "takes them for class probabilities, and there is one class"
    elif not may_be_probabilities:
        why = "takes them for class probabilities, and they are negative or do not sum to 1"
    else:
        return
    raise UserError(
        f"no loss_fn was given, and the targets are {target.dtype} of shape {tuple(target.shape)} for an "
        f"output of shape {tuple(output.shape)}: cross-entropy, the default loss, {why}; give the Trainer a "
        "loss_fn: F.mse_loss for regression, F.binary_cross_entropy_with_logits for yes or no, "
        "F.cross_entropy if these targets are meant for it"
    )


def _class_dimension(tensor: Tensor) -> int:
    return 1 if tensor.dim() > 1 else 0


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
