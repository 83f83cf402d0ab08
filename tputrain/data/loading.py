"""Sequences as the loaders that a Trainer takes."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tputrain.batches import Batch
from tputrain.data.shuffled import ShuffledSequences, num_label_bytes


@dataclass(frozen=True)
class TrainingBatches:
    """Sequences as the Trainer's indexed loader."""

    sequences: ShuffledSequences
    batch_size: int
    micro_batches: int
    fingerprint: str

    @property
    def lengths(self) -> list[int]:
        """Tokens that a row of a batch may have."""
        return [int(each) for each in getattr(self.sequences, "lengths", [self.sequences.sequence_length])]

    def batch_at(self, step: int, micro: int) -> Batch:
        """Micro-batch `micro` of step `step`: `batch_size` sequences."""
        return self.sequences.batch_at(step, micro, self.batch_size, self.micro_batches)

    def epochs_at(self, step: int) -> float:
        """How many epochs the steps before `step` come to."""
        return self.sequences.epochs_at(step, self.batch_size * self.micro_batches)


@dataclass(frozen=True)
class ValidationBatches:
    """Sequences as an evaluation goes through them."""

    sequences: ShuffledSequences
    batch_size: int
    token_bytes: np.ndarray

    def __iter__(self) -> Iterator[Batch]:
        return self.sequences.eval_batches(self.batch_size)

    def bytes_of(self, batch: Batch) -> int:
        """Bytes of text that the labels of `batch` stand for."""
        return num_label_bytes(batch, self.token_bytes)
