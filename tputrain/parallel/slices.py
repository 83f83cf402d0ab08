"""The part of a batch that each rank takes: rows, in the order of the ranks."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from torch import Tensor

from tputrain import batches as batch_of
from tputrain.batches import Batch
from tputrain.errors import UserError


def slices(batch: Batch, count: int, equal: bool) -> list[Batch]:
    """`count` slices of a batch on the host, in order; one may be empty unless they are to be `equal`.

    Raises UserError where they are to be, and the samples do not divide.
    """
    samples = batch_of.num_samples(batch)
    if equal and samples % count:
        raise UserError(
            f"a batch of {samples} samples does not divide among {count} ranks: expected a multiple of "
            f"{count} (batch.sequences in a recipe; a DataLoader drops a smaller one with drop_last=True)"
        )
    borders = [rank * samples // count for rank in range(count + 1)]
    return [_rows(batch, first, last, samples) for first, last in pairwise(borders)]


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
