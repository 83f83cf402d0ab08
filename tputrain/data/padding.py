"""One document a row, filled up to one of few lengths: what packing is for who must not mix documents."""

from collections.abc import Iterator

import numpy as np
import torch

from tputrain.batches import IGNORED_LABEL, PADDING
from tputrain.data.config import DataError, bucket_lengths
from tputrain.data.pieces import cut_documents
from tputrain.data.shuffled import Batch, TokenSequences, epoch_order

_OF_BATCHES = 2**63
"""Added to the epoch's number: the order of batches is not that of rows."""


class PaddedSequences(TokenSequences):
    """Documents as rows of similar lengths.

    A document longer than `sequence_length` is cut into rows; a row with nothing to learn is left out.
    A batch holds the same four tensors, of shape (sequences, a length): `buckets` lengths at most, evenly up
    to `sequence_length`, and all micro-batches of a step have the same one: so many programs are compiled. In
    what fills a row up, after its text: `padding_id`, no labels, document -1 where the text is document 0.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        offsets: np.ndarray,
        sequence_length: int,
        seed: int,
        name: str,
        learned: np.ndarray | None = None,
        *,
        padding_id: int,
        buckets: int,
    ):
        self.sequence_length = sequence_length
        self.lengths = np.array(bucket_lengths(sequence_length, buckets))
        self.num_tokens, self.num_documents = len(tokens), len(offsets) - 1
        self._tokens, self._learned = np.asarray(tokens), learned
        self._padding_id, self.seed = padding_id, seed
        self._starts, self._sizes, self._ends = cut_documents(np.asarray(offsets), sequence_length, learned)
        self.num_sequences = len(self._starts)
        self._plans: dict[tuple[int, int, int], list[np.ndarray]] = {}
        if self.num_sequences == 0:
            raise DataError(f"the {name} text has no document with anything to learn: give more (data.files)")

    def batch_at(self, step: int, micro: int, sequences: int, micros: int = 1) -> Batch:
        """Batch `micro` (of `micros`, `sequences` each) of step `step`: a pure function of (seed, step).

        Every epoch takes each row once, in batches and an order of its own; where rows do not fill the last
        batch of the greatest length, rows that do not count do.
        """
        if not 0 <= micro < micros:
            raise ValueError(f"micro={micro}: expected 0 to {micros - 1}")
        epoch, place = divmod(step, self._steps_an_epoch(sequences * micros))
        rows = self._plan(self.seed, epoch, sequences * micros)[place]
        return self._batch(rows[micro * sequences : (micro + 1) * sequences], self._length_for(rows))

    def epochs_at(self, step: int, sequences: int) -> float:
        """How many epochs the steps before `step`, of `sequences` each, come to."""
        return step / self._steps_an_epoch(sequences)

    def _steps_an_epoch(self, sequences: int) -> int:
        return len(self._plan(self.seed, 0, sequences))

    def eval_batches(self, sequences: int, max_batches: int | None = None) -> Iterator[Batch]:
        """Batches of `sequences` rows, always the same ones in the same order, whatever the seed."""
        for rows in self._plan(0, 0, sequences)[:max_batches]:
            yield self._batch(rows, self._length_for(rows))

    def batch_of(self, indices: np.ndarray) -> Batch:
        """The rows numbered `indices` (int64; -1: one that does not count), as a batch."""
        return self._batch(indices, self._length_for(indices))

    def _length_for(self, rows: np.ndarray) -> int:
        longest = self._sizes[rows[rows >= 0]].max()
        return int(self.lengths[np.searchsorted(self.lengths, longest)])

    def _batch(self, rows: np.ndarray, length: int) -> Batch:
        columns = np.arange(length)
        is_text = (columns < self._sizes[rows][:, None]) & (rows >= 0)[:, None]
        places = np.minimum(self._starts[rows][:, None] + columns, self.num_tokens - 1)
        nexts = np.minimum(places + 1, self.num_tokens - 1)
        is_label = is_text & (places + 1 < self._ends[rows][:, None])
        if self._learned is not None:
            is_label &= self._learned[nexts]
        arrays = {
            "input_ids": np.where(is_text, self._tokens[places], self._padding_id).astype(np.int64),
            "labels": np.where(is_label, self._tokens[nexts].astype(np.int64), IGNORED_LABEL),
            "position_ids": np.broadcast_to(columns, places.shape).copy(),
            "document_ids": np.where(is_text, 0, PADDING),
        }
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def _plan(self, seed: int, epoch: int, size: int) -> list[np.ndarray]:
        """The rows of each batch of an epoch, `size` each, -1 in the last places of one batch at most.

        How many there are does not depend on the epoch: it follows from how many rows each length has.
        """
        key = (seed, epoch, size)
        if key not in self._plans:
            if len(self._plans) > 3:
                self._plans.clear()
            self._plans[key] = self._make_plan(*key)
        return self._plans[key]

    def _make_plan(self, seed: int, epoch: int, size: int) -> list[np.ndarray]:
        order = epoch_order(seed, epoch, self.num_sequences)
        bucket = np.searchsorted(self.lengths, self._sizes[order])
        batches: list[np.ndarray] = []
        rest = np.empty(0, dtype=np.int64)  # of the shorter ones: they go with the next longer
        for number in range(len(self.lengths)):
            rows = np.concatenate([rest, order[bucket == number]])
            full = len(rows) // size * size
            batches += list(rows[:full].reshape(-1, size))
            rest = rows[full:]
        if len(rest):
            batches.append(np.concatenate([rest, np.full(size - len(rest), -1, dtype=np.int64)]))
        return [batches[place] for place in epoch_order(seed, epoch + _OF_BATCHES, len(batches))]
