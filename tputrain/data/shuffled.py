"""Sequences of equal length by number, and the order in which a run sees them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from tputrain.batches import IGNORED_LABEL
from tputrain.data.mapped_array import MappedArray

Batch = dict[str, torch.Tensor]


class ShuffledSequences(ABC):
    """Sequences of `sequence_length` tokens, numbered from 0, in an order that (seed, step) decides.

    A batch holds four int64 CPU tensors of shape (sequences, sequence_length): `input_ids`; `labels`, the
    next token, or -100 where there is none to learn; `position_ids`, from 0 in each document;
    `document_ids`, from 0 in each sequence, and -1 in padding.
    """

    sequence_length: int
    num_tokens: int
    num_documents: int
    num_sequences: int
    seed: int

    @abstractmethod
    def batch_of(self, indices: np.ndarray) -> Batch:
        """The sequences numbered `indices` (int64, below `num_sequences`), as a batch."""

    def at(self, places: np.ndarray) -> np.ndarray:
        """Which sequences stand at `places` (int64, from 0) of the endless row that is trained on.

        Every epoch takes each sequence once, in an order of its own.
        """
        return shuffled(self.seed, places, self.num_sequences)

    def batch_at(self, step: int, micro: int, sequences: int, micros: int = 1) -> Batch:
        """Batch `micro` (of `micros`, `sequences` each) of step `step` (from 0): a pure function of (seed,
        step). A batch may hold the end of one epoch and the start of the next.
        """
        if not 0 <= micro < micros:
            raise ValueError(f"micro={micro}: expected 0 to {micros - 1}")
        return self.batch_of(self.at((step * micros + micro) * sequences + np.arange(sequences)))

    def epochs_at(self, step: int, sequences: int) -> float:
        """How many epochs the steps before `step`, of `sequences` each, come to."""
        return step * sequences / self.num_sequences

    def eval_batches(self, sequences: int, max_batches: int | None = None) -> Iterator[Batch]:
        """Batches of exactly `sequences`, always the same ones in the same order, whatever the seed.

        The order is shuffled, so that the first few are a fair sample. Each sequence is in one batch; the
        last one is filled up with sequences whose labels are all -100.
        """
        order = epoch_order(0, 0, self.num_sequences)
        for first in range(0, self.num_sequences, sequences)[:max_batches]:
            chosen = order[first : first + sequences]
            batch = self.batch_of(np.resize(chosen, sequences))
            batch["labels"][len(chosen) :] = IGNORED_LABEL
            yield batch


class TokenSequences(ShuffledSequences):
    """Sequences cut from one array of tokens; another process opens that array's file and is not sent it."""

    _tokens: np.ndarray

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tokens": MappedArray.of(self._tokens)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state | {"_tokens": state["_tokens"].open()})


def num_label_bytes(batch: Batch, token_bytes: np.ndarray) -> int:
    """Bytes of text that a batch is trained on or judged by; `token_bytes`: `Tokenizer.token_bytes()`."""
    labels = batch["labels"].numpy()
    return int(token_bytes[labels[labels != IGNORED_LABEL]].sum())


def shuffled(
    seed: int, places: np.ndarray, count: int, order_of: Callable[[int, int, int], np.ndarray] | None = None
) -> np.ndarray:
    """Which of `count` items stand at `places` (int64, from 0) of an endless row of epochs, each of which has
    every item once, in an order of its own. `order_of`: what gives that, `epoch_order` by default.
    """
    epochs, within = np.divmod(places, count)
    items = np.empty_like(places)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        items[chosen] = (order_of or epoch_order)(seed, int(epoch), count)[within[chosen]]
    return items


@lru_cache(maxsize=8)
def epoch_order(seed: int, epoch: int, count: int) -> np.ndarray:
    """A permutation of `count` items that belongs to (seed, epoch), 8 bytes an item, kept for the last few
    epochs.

    Sorting Philox's raw output, which NumPy promises never to change; its `permutation` carries no such
    promise.
    """
    bits = np.random.Philox(key=np.array([seed % 2**64, epoch], dtype=np.uint64)).random_raw(count)
    order = np.argsort(bits, kind="stable")
    order.flags.writeable = False
    return order
