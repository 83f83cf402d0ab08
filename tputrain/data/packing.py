"""Documents laid end to end and cut into sequences, and which sequences a training step sees."""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch

from tputrain.batches import IGNORED_LABEL
from tputrain.data.config import DataError

Batch = dict[str, torch.Tensor]


class PackedSequences:
    """A stream of tokens cut into sequences of equal length, with the borders of documents kept.

    `tokens` holds all documents end to end, `offsets` where each starts, and the total length last.
    Sequence i is tokens [i * length, (i + 1) * length): a document that crosses its end goes on in the next
    one as if it started there. What does not fill a sequence at the very end is left out.

    A batch holds four int64 CPU tensors of shape (sequences, sequence_length): `input_ids`; `labels`, the
    next token, or -100 where that belongs to another document; `position_ids`, from 0 in each document;
    `document_ids`, from 0 in each sequence.
    """

    def __init__(self, tokens: np.ndarray, offsets: np.ndarray, sequence_length: int, seed: int, name: str):
        self.sequence_length = sequence_length
        self.num_tokens = len(tokens)
        self.num_documents = len(offsets) - 1
        self.num_sequences = len(tokens) // sequence_length
        # A plain array over the same (mapped) memory: indexing NumPy's memmap class costs several times as
        # much.
        self._tokens, self._offsets, self._seed = np.asarray(tokens), np.asarray(offsets), seed
        if self.num_sequences == 0:
            raise DataError(
                f"data.sequence_length={sequence_length} is longer than the {name} text ({len(tokens)} "
                "tokens): shorten it, give more text (data.files) or change data.validation_fraction"
            )

    def batch_at(self, step: int, micro: int, sequences: int, micros: int = 1) -> Batch:
        """Batch `micro` (of `micros`, `sequences` each) of step `step` (from 0): a pure function of (seed,
        step).

        Every epoch takes each sequence once, in an order of its own. A batch may hold the end of one epoch
        and the start of the next.
        """
        if not 0 <= micro < micros:
            raise ValueError(f"micro={micro}: expected 0 to {micros - 1}")
        places = (step * micros + micro) * sequences + np.arange(sequences)
        epochs, within = np.divmod(places, self.num_sequences)
        indices = np.empty_like(places)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            indices[chosen] = _epoch_order(self._seed, int(epoch), self.num_sequences)[within[chosen]]
        return self.batch_of(indices)

    def eval_batches(self, sequences: int, max_batches: int | None = None) -> Iterator[Batch]:
        """Batches of exactly `sequences`, always the same ones in the same order, whatever the seed.

        The order is shuffled, so that the first few are a fair sample. What does not fill a batch is left
        out; where there is not even one, the only batch is filled up with sequences whose labels are all
        -100.
        """
        order = _epoch_order(0, 0, self.num_sequences)
        if self.num_sequences < sequences:
            batch = self.batch_of(np.resize(order, sequences))
            batch["labels"][self.num_sequences :] = IGNORED_LABEL
            yield batch
            return
        full = self.num_sequences // sequences
        for number in range(full if max_batches is None else min(full, max_batches)):
            yield self.batch_of(order[number * sequences : (number + 1) * sequences])

    def batch_of(self, indices: np.ndarray) -> Batch:
        """The sequences numbered `indices` (int64, below `num_sequences`), as a batch."""
        first = indices[:, None] * self.sequence_length
        places = first + np.arange(self.sequence_length)
        documents = np.searchsorted(self._offsets, places, side="right") - 1
        starts, ends = self._offsets[documents], self._offsets[documents + 1]
        last_of_document = places + 1 == ends
        # The stream ends with the end of a document, so the clipped place is never a label.
        following = self._tokens[np.minimum(places + 1, self.num_tokens - 1)].astype(np.int64)
        arrays = {
            "input_ids": self._tokens[places].astype(np.int64),
            "labels": np.where(last_of_document, IGNORED_LABEL, following),
            "position_ids": places - np.maximum(starts, first),
            "document_ids": documents - documents[:, :1],
        }
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def bytes_per_label(self, token_bytes: np.ndarray) -> float:
        """Bytes of text per trained-on label, over all sequences."""
        used = self.num_sequences * self.sequence_length
        labels = self._tokens[1 : used + 1]
        within = np.ones(len(labels), dtype=bool)
        ends = self._offsets[1:] - 1
        within[ends[ends < len(labels)]] = False
        return float(token_bytes[labels[within]].sum() / max(1, within.sum()))


def num_label_bytes(batch: Batch, token_bytes: np.ndarray) -> int:
    """Bytes of text that a batch is trained on or judged by; `token_bytes`: `Tokenizer.token_bytes()`."""
    labels = batch["labels"].numpy()
    return int(token_bytes[labels[labels != IGNORED_LABEL]].sum())


@lru_cache(maxsize=8)
def _epoch_order(seed: int, epoch: int, count: int) -> np.ndarray:
    """A permutation of `count` items that belongs to (seed, epoch), 8 bytes an item, kept for the last few
    epochs.

    Sorting Philox's raw output, which NumPy promises never to change; its `permutation` carries no such
    promise.
    """
    bits = np.random.Philox(key=np.array([seed % 2**64, epoch], dtype=np.uint64)).random_raw(count)
    order = np.argsort(bits, kind="stable")
    order.flags.writeable = False
    return order
