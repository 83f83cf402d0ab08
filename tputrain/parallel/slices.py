"""The part of a batch that each rank takes: rows, in the order of the ranks, equally many on each."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tputrain import batches as batch_of
from tputrain.batches import Batch
from tputrain.errors import UserError
from tputrain.models.sequence import stretches_of


def slices(batch: Batch, count: int) -> list[Batch]:
    """`count` slices of one length of a batch on the host, in order.

    Raises UserError where its samples do not divide.
    """
    samples = batch_of.num_samples(batch)
    if samples % count:
        raise UserError(
            f"a batch of {samples} samples does not divide among {count} ranks: expected a multiple of "
            f"{count} (batch.sequences in a recipe; a DataLoader drops a smaller one with drop_last=True)"
        )
    return _consecutive(batch, 0, samples // count, count, samples)


def rounds(batch: Batch, count: int) -> list[list[Batch | None]]:
    """A batch on the host as rounds, in each of which `count` ranks have slices of one length.

    As few rounds as there can be: what does not divide is a second one, of a sample a rank. None: there are
    no samples left for that rank.
    """
    samples = batch_of.num_samples(batch)
    length, rest = divmod(samples, count)
    found: list[list[Batch | None]] = []
    if length:
        found.append([*_consecutive(batch, 0, length, count, samples)])
    if rest:
        single = _consecutive(batch, samples - rest, 1, rest, samples)
        found.append([*single, *[None] * (count - rest)])
    return found


def columns(batch: Batch | None, count: int) -> list[Batch | None]:
    """`count` parts of equal length of the sequences in a batch of text on the host, in order of the ranks:
    two stretches each (`tputrain.models.sequence`).

    Each says the places of its tokens as `position_ids`, unless the batch does. Raises UserError for another
    batch, and where a sequence does not divide. None: there is no batch, and so no part.
    """
    if count == 1 or batch is None:
        return [batch] * count
    labels = batch_of.target_of(batch)
    if not (batch_of.is_text(batch) and isinstance(labels, Tensor) and labels.dim() == 2):
        raise UserError(
            f"parallel.context={count}: expected batches of text, with input_ids and labels of the shape "
            "(sequences, tokens)"
        )
    length = labels.shape[1]
    check_length(length, count)
    batch = {"position_ids": torch.arange(length).expand(labels.shape)} | dict(batch)
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.shape != labels.shape:
            raise UserError(
                f"parallel.context={count}: {name} in a batch has the shape {tuple(value.shape)}: expected "
                f"that of labels, {tuple(labels.shape)}, of which each rank takes a part"
            )
    return [_stretches(batch, stretches_of(rank, count), length // (2 * count)) for rank in range(count)]


def divides(length: int, count: int) -> bool:
    """Whether a sequence of `length` tokens has two stretches for each of `count` ranks, or one for one."""
    return count == 1 or length % (2 * count) == 0


def check_length(length: int, count: int) -> None:
    """Raise UserError where a sequence of `length` tokens does not divide among `count` ranks."""
    if not divides(length, count):
        raise UserError(
            f"parallel.context={count}: a sequence of {length} tokens does not divide: expected a multiple "
            f"of {2 * count}, as each rank has two stretches (data.sequence_length in a recipe; padded "
            "batches have data.buckets lengths up to that)"
        )


def _stretches(batch: Mapping[str, Any], numbers: Sequence[int], length: int) -> Batch:
    def part(value: Tensor) -> Tensor:
        return torch.cat([value[:, number * length : (number + 1) * length] for number in numbers], 1)

    return {name: part(value) if isinstance(value, Tensor) else value for name, value in batch.items()}


def _consecutive(batch: Batch, first: int, length: int, count: int, samples: int) -> list[Batch]:
    starts = range(first, first + length * count, length)
    return [_rows(batch, start, start + length, samples) for start in starts]


def _rows(value: Any, first: int, last: int, samples: int) -> Any:
    if isinstance(value, Tensor) and value.dim() > 0:
        if value.shape[0] != samples:
            raise UserError(
                f"a batch of {samples} samples holds a tensor of shape {tuple(value.shape)}: expected "
                f"{samples} in its first dimension, by which ranks divide a batch"
            )
        return value[first:last]
    if isinstance(value, Mapping):
        return {key: _rows(each, first, last, samples) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [_rows(each, first, last, samples) for each in value]
    return value
