"""Documents laid end to end and cut into sequences, and which sequences a training step sees."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from tputrain.batches import IGNORED_LABEL
from tputrain.data.config import DataError
from tputrain.data.mapped_array import MappedArray

Batch = dict[str, torch.Tensor]


class PackedSequences:
    """A stream of tokens cut into sequences of equal length, with the borders of documents kept.

    `tokens` holds all documents end to end, `offsets` where each starts, and the total length last.
    Sequence i is tokens [i * length, (i + 1) * length): a document that crosses its end goes on in the next
    one as if it started there. What does not fill a sequence at the very end is left out, and so is a
    sequence that holds nothing to learn.

    A batch holds four int64 CPU tensors of shape (sequences, sequence_length): `input_ids`; `labels`, the
    next token, or -100 where that belongs to another document or is not `learned` (bool, a token; None: all
    are); `position_ids`, from 0 in each document; `document_ids`, from 0 in each sequence.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        offsets: np.ndarray,
        sequence_length: int,
        seed: int,
        name: str,
        learned: np.ndarray | None = None,
    ):
        self.sequence_length = sequence_length
        self.num_tokens = len(tokens)
        self.num_documents = len(offsets) - 1
        self.num_sequences = len(tokens) // sequence_length
        # A plain array over the same (mapped) memory: indexing NumPy's memmap class costs several times as
        # much.
        self._tokens, self._offsets, self._seed = np.asarray(tokens), np.asarray(offsets), seed
        self._learned = learned
        self._places = None if learned is None else self._with_labels()
        if self.num_sequences == 0:
            raise DataError(
                f"data.sequence_length={sequence_length} is longer than the {name} text ({len(tokens)} "
                "tokens): shorten it, give more text (data.files) or change data.validation_fraction"
            )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tokens": MappedArray.of(self._tokens)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state | {"_tokens": state["_tokens"].open()})

    def batch_at(self, step: int, micro: int, sequences: int, micros: int = 1) -> Batch:
        """Batch `micro` (of `micros`, `sequences` each) of step `step` (from 0): a pure function of (seed,
        step).

        Every epoch takes each sequence once, in an order of its own. A batch may hold the end of one epoch
        and the start of the next.
        """
        if not 0 <= micro < micros:
            raise ValueError(f"micro={micro}: expected 0 to {micros - 1}")
        places = (step * micros + micro) * sequences + np.arange(sequences)
        return self.batch_of(shuffled(self._seed, places, self.num_sequences))

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

    def batch_of(self, indices: np.ndarray) -> Batch:
        """The sequences numbered `indices` (int64, below `num_sequences`), as a batch."""
        if self._places is not None:
            indices = self._places[indices]
        first = indices[:, None] * self.sequence_length
        places = first + np.arange(self.sequence_length)
        documents = np.searchsorted(self._offsets, places, side="right") - 1
        starts, ends = self._offsets[documents], self._offsets[documents + 1]
        last_of_document = places + 1 == ends
        # The stream ends with the end of a document, so the clipped place is never a label.
        nexts = np.minimum(places + 1, self.num_tokens - 1)
        following = self._tokens[nexts].astype(np.int64)
        if self._learned is not None:
            following = np.where(self._learned[nexts], following, IGNORED_LABEL)
        arrays = {
            "input_ids": self._tokens[places].astype(np.int64),
            "labels": np.where(last_of_document, IGNORED_LABEL, following),
            "position_ids": places - np.maximum(starts, first),
            "document_ids": documents - documents[:, :1],
        }
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def bytes_per_label(self, token_bytes: np.ndarray) -> float:
        """Bytes of text per trained-on label, over all sequences."""
        labels, within = self._labels()
        return float(token_bytes[labels[within]].sum() / max(1, within.sum()))

    def _labels(self) -> tuple[np.ndarray, np.ndarray]:
        """The token after each that is in a sequence, and whether it is a label."""
        used = self.num_tokens // self.sequence_length * self.sequence_length
        labels = self._tokens[1 : used + 1]
        within = (
            np.ones(len(labels), dtype=bool) if self._learned is None else self._learned[1 : used + 1].copy()
        )
        ends = self._offsets[1:] - 1
        within[ends[ends < len(labels)]] = False
        return labels, within

    def _with_labels(self) -> np.ndarray:
        """The numbers of the sequences that hold something to learn, which are the only ones that count."""
        _, within = self._labels()
        starts = np.arange(self.num_sequences) * self.sequence_length
        places = np.flatnonzero(np.add.reduceat(within, starts)) if len(starts) else starts
        self.num_sequences = len(places)
        return places


def num_label_bytes(batch: Batch, token_bytes: np.ndarray) -> int:
    """Bytes of text that a batch is trained on or judged by; `token_bytes`: `Tokenizer.token_bytes()`."""
    labels = batch["labels"].numpy()
    return int(token_bytes[labels[labels != IGNORED_LABEL]].sum())


def shuffled(seed: int, places: np.ndarray, count: int) -> np.ndarray:
    """Which of `count` items stand at `places` (int64, from 0) of an endless row of epochs, each of which has
    every item once, in an order of its own.
    """
    epochs, within = np.divmod(places, count)
    items = np.empty_like(places)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        items[chosen] = epoch_order(seed, int(epoch), count)[within[chosen]]
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
