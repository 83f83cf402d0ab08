"""What a batch is: how it reaches the model, what it weighs, how much it holds.

dict        -> model(**batch)
tuple, list -> model(*batch[:-1]), and batch[-1] is the target; a model whose forward requires as many
               arguments as the batch has gets the target too (and returns its loss)
tensor      -> model(batch)
"""

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from tputrain.errors import UserError

IGNORED_LABEL = -100
"""Labels of this value carry no weight; cross-entropy's default `ignore_index`."""

PADDING = -1
"""What `document_ids` says where a row is filled up."""

Batch = Any


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The same batch with every tensor in it on `device`."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return [to_device(value, device) for value in batch]
    return batch


def form(batch: Batch) -> Hashable:
    """Keys, shapes and dtypes: the same for batches that one program can take."""
    if isinstance(batch, Tensor):
        return batch.shape, batch.dtype
    if isinstance(batch, Mapping):
        return tuple((key, form(value)) for key, value in batch.items())
    if isinstance(batch, tuple | list):
        return tuple(form(value) for value in batch)
    return None


def arguments(model: nn.Module, batch: Batch) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """What the model is called with for `batch`, by position and by name."""
    if isinstance(batch, Mapping):
        return (), batch
    if isinstance(batch, Tensor):
        return (batch,), {}
    return (batch if _wants_target(model, batch) else batch[:-1]), {}


def call(model: nn.Module, batch: Batch) -> Any:
    """The model's output for `batch`."""
    by_position, by_name = arguments(model, batch)
    return model(*by_position, **by_name)


def _wants_target(model: nn.Module, batch: tuple | list) -> bool:
    as_written = getattr(model, "_orig_mod", model)  # within what torch.compile has made
    return len(batch) == 1 or _num_required_arguments(type(as_written).forward) == len(batch)


@lru_cache(maxsize=64)
def _num_required_arguments(forward: Callable[..., Any]) -> int:
    required = [
        parameter
        for parameter in inspect.signature(forward).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    return len(required) - 1  # self


def target_of(batch: Batch) -> Any:
    """What the output is to be compared with, or None."""
    if isinstance(batch, Mapping):
        return batch.get("labels")
    if isinstance(batch, Tensor):
        return None
    if not isinstance(batch, Sequence):
        raise _no_tensors(batch)
    return None if len(batch) < 2 else batch[-1]


def with_target(batch: Batch, target: Any) -> Batch:
    """The batch with another target, where it has one."""
    if isinstance(batch, Mapping):
        return dict(batch) | {"labels": target}
    return [*batch[:-1], target]


def weight(batch: Batch, first: int = 0) -> int:
    """How much the batch's mean loss counts: integer labels that are not ignored, else samples.

    `first`: the first column of two-dimensional labels that counts. `batch` is still on the host: counting
    there costs no read of the device.
    """
    target = target_of(batch)
    if isinstance(target, Tensor) and target.dtype in (torch.int64, torch.int32) and target.dim() > 0:
        columns = target[:, first:] if target.dim() == 2 else target
        return int(torch.count_nonzero(columns != IGNORED_LABEL))
    return num_samples(batch)


def counted(
    slices: Sequence[Sequence[Batch]], weights: Sequence[Sequence[int]], rank: int, context: int = 1
) -> tuple[list[Batch], list[float]]:
    """The batches of `rank` that count in a step's loss, and the factors of their mean losses.

    `slices`: of each micro-batch one a rank; `weights`: theirs. The mean over ranks of the sums over batches
    of factor times loss is the step's loss. The mean over no labels is not a number: micro-batches without
    are left out, by all ranks. A rank whose slice alone has none takes another one, with the factor 0; where
    `context` ranks share sequences, they do so together, and a slice among them has some label (`labelled`).
    """
    total = sum(sum(each) for each in weights)
    batches, factors = [], []
    for parts, own in zip(slices, weights, strict=True):
        if sum(own):
            taken = part_with_labels(own, rank, context)
            is_labelled = own[taken] or taken == rank  # this rank's own part is, where it was copied
            batches.append(parts[taken] if is_labelled else labelled(parts[taken]))
            factors.append(own[rank] * len(own) / total)
    return batches, factors


def part_with_labels(weights: Sequence[int], rank: int, context: int) -> int:
    """The part of a batch that `rank` runs: its own, unless what its `context` ranks share weighs nothing."""
    first = rank - rank % context
    if any(weights[first : first + context]):
        return rank
    counts = next(number for number, weight in enumerate(weights) if weight)
    return counts - counts % context + rank % context


def labelled(batch: Batch) -> Batch:
    """A batch with a label that counts, whatever it is: a rank whose part of a sequence has none makes a loss
    too, with the factor 0, since others attend to its tokens.
    """
    labels = target_of(batch).clone()
    labels[0, 0] = 0
    return with_target(batch, labels)


def size(batch: Batch) -> int:
    """How much was processed: tokens where the batch is text (it has `input_ids`), else samples.

    Padding does not count: what `attention_mask` leaves out, or is of no document (`PADDING`).
    """
    if not is_text(batch):
        return num_samples(batch)
    if isinstance(mask := batch.get("attention_mask"), Tensor) and mask.dim() == 2:
        return int(torch.count_nonzero(mask))
    if isinstance(documents := batch.get("document_ids"), Tensor):
        return int(torch.count_nonzero(documents != PADDING))
    return batch["input_ids"].numel()


def is_text(batch: Batch) -> bool:
    """Whether progress is counted in tokens."""
    return isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), Tensor)


def num_samples(batch: Batch) -> int:
    """The length of the first dimension of the first tensor in the batch."""
    values = batch.values() if isinstance(batch, Mapping) else [batch] if isinstance(batch, Tensor) else batch
    for value in values:
        if isinstance(value, Tensor) and value.dim() > 0:
            return value.shape[0]
    raise _no_tensors(batch)


def _no_tensors(batch: object) -> UserError:
    return UserError(
        f"a batch of type {type(batch).__name__} holds no tensor: expected a dict, tuple or list of tensors"
    )
