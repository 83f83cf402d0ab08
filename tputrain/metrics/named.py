"""Metric functions that a configuration can name.

Each takes what the model returned and the batch's target, and gives the mean over the batch as a scalar
tensor on the device. Labels of -100 do not count.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tputrain.batches import IGNORED_LABEL
from tputrain.config_checks import expect_choice
from tputrain.errors import UserError

Metric = Callable[[Any, Any], Tensor | float]
"""(output, target) of a batch to its mean over the batch: a tensor of one element, or a number."""

PERPLEXITY = "perplexity"
"""No function of a batch: e to the mean loss of the whole evaluation. Text has it unasked."""


def accuracy(output: Any, target: Tensor) -> Tensor:
    """The share of labels that are the likeliest class."""
    return _share_within(1, _classes_last(output, target), target)


def top5_accuracy(output: Any, target: Tensor) -> Tensor:
    """The share of labels among the five likeliest classes."""
    return _share_within(5, _classes_last(output, target), target)


def next_token_accuracy(output: Any, target: Tensor) -> Tensor:
    """The share of tokens foreseen by the logits before them: for models that shift labels themselves."""
    logits = _classes_last(output, target)
    return _share_within(1, logits[:, :-1], target[:, 1:])


def mean_absolute_error(output: Any, target: Tensor) -> Tensor:
    """The mean of |output - target|, both of one shape."""
    prediction = _logits_of(output)
    if prediction.shape != target.shape:
        raise _misfit("mean_absolute_error", prediction, target)
    return (prediction.float() - target.float()).abs().mean()


METRICS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "accuracy": accuracy,
    "top5_accuracy": top5_accuracy,
    "next_token_accuracy": next_token_accuracy,
    "mean_absolute_error": mean_absolute_error,
}


def check_metric_names(key: str, names: Sequence[str]) -> None:
    """Raise UserError at a name that stands for no metric."""
    for name in names:
        expect_choice(key, name, (*METRICS, PERPLEXITY))


def metric_functions(names: Sequence[str]) -> dict[str, Metric]:
    """The functions of those `names` that stand for one."""
    return {name: METRICS[name] for name in names if name != PERPLEXITY}


def _share_within(k: int, logits: Tensor, target: Tensor) -> Tensor:
    """`logits` (..., classes), `target` (...): how often the label is among the `k` likeliest."""
    counts = target != IGNORED_LABEL
    # The rank of the label's logit, not topk: among equal logits the label comes first, on every device.
    own = logits.gather(-1, target.clamp(min=0).unsqueeze(-1))
    found = ((logits > own).sum(dim=-1) < k) & counts
    return found.sum() / counts.sum().clamp(min=1)


def _classes_last(output: Any, target: Tensor) -> Tensor:
    """The logits as (..., classes) for `target` (...).

    A bare tensor has its classes in the second dimension, as cross-entropy wants them; in a model's own
    output they are in the last.
    """
    logits = _logits_of(output)
    second = logits.movedim(1, -1) if logits.dim() > 1 else logits
    for candidate in (second, logits) if isinstance(output, Tensor) else (logits, second):
        if candidate.dim() > 1 and candidate.shape[:-1] == target.shape:
            return candidate
    raise _misfit("a metric of classes", logits, target)


def _logits_of(output: Any) -> Tensor:
    found = output
    if not isinstance(output, Tensor):
        found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(found, Tensor) and found.dim() > 0:
        return found
    what = "a scalar loss" if isinstance(found, Tensor) else f"a {type(output).__name__} without logits"
    raise UserError(
        f"trainer.metrics: the model returns {what}, and metrics compare its logits with the target: return "
        "them beside the loss (a dict with 'loss' and 'logits'), or leave the metrics out"
    )


def _misfit(what: str, output: Tensor, target: Any) -> UserError:
    shape = tuple(target.shape) if isinstance(target, torch.Tensor) else type(target).__name__
    return UserError(
        f"trainer.metrics: {what} cannot compare an output of shape {tuple(output.shape)} with a target of "
        f"shape {shape}"
    )
