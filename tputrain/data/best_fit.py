"""Whole documents packed into sequences: none is cut that fits one."""

import numpy as np
import torch

from tputrain.batches import IGNORED_LABEL, PADDING
from tputrain.data.config import DataError
from tputrain.data.pieces import cut_documents
from tputrain.data.shuffled import Batch, TokenSequences


class BestFitSequences(TokenSequences):
    """Documents put together so that they fill sequences, longest first, each where least room is left.

    That is best-fit decreasing (Ding et al., "Fewer Truncations Improve Language Modeling", 2024). Only a
    document longer than `sequence_length` is cut, and a piece with nothing to learn is left out. What fills a
    sequence up, after its documents: `padding_id`, no labels, document -1.
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
    ):
        self.sequence_length, self.seed = sequence_length, seed
        self.num_documents = len(offsets) - 1
        self._tokens, self._learned, self._padding_id = np.asarray(tokens), learned, padding_id
        starts, sizes, ends = cut_documents(np.asarray(offsets), sequence_length, learned)
        if len(starts) == 0:
            raise DataError(f"the {name} text has no document with anything to learn: give more (data.files)")
        sequence_of = best_fit(sizes, sequence_length)
        order = np.argsort(sequence_of, kind="stable")
        self._starts, self._sizes, self._ends = starts[order], sizes[order], ends[order]
        self.num_tokens = int(sizes.sum())
        self.num_sequences = int(sequence_of.max()) + 1
        self._first_piece = np.searchsorted(sequence_of[order], np.arange(self.num_sequences + 1))

    def batch_of(self, indices: np.ndarray) -> Batch:
        shape = (len(indices), self.sequence_length)
        arrays = {
            "input_ids": np.full(shape, self._padding_id, np.int64),
            "labels": np.full(shape, IGNORED_LABEL, np.int64),
            "position_ids": np.zeros(shape, np.int64),
            "document_ids": np.full(shape, PADDING, np.int64),
        }
        for row, index in enumerate(indices):
            chosen = slice(self._first_piece[index], self._first_piece[index + 1])
            sizes = self._sizes[chosen]
            documents = np.repeat(np.arange(len(sizes)), sizes)
            positions = np.arange(len(documents)) - np.repeat(sizes.cumsum() - sizes, sizes)
            places = self._starts[chosen][documents] + positions
            has_next = places + 1 < self._ends[chosen][documents]
            nexts = np.minimum(places + 1, len(self._tokens) - 1)
            if self._learned is not None:
                has_next &= self._learned[nexts]
            filled = {
                "input_ids": self._tokens[places],
                "labels": np.where(has_next, self._tokens[nexts].astype(np.int64), IGNORED_LABEL),
                "position_ids": positions,
                "document_ids": documents,
            }
            for name, values in filled.items():
                arrays[name][row, : len(values)] = values
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


def best_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Which bin (from 0) each item goes to, where a bin holds `capacity` and no item is larger.

    Longest first, each into the bin with least room of those that it fits. Items of one size are placed
    together, so that the time goes with the number of different sizes and rooms.
    """
    bins = np.empty(len(sizes), np.int64)
    order = np.argsort(-sizes, kind="stable")
    with_room: dict[int, list[int]] = {}  # bins by the room that is left
    rooms = 0  # bit r: there is a bin with that room
    num_bins = place = 0
    different, counts = np.unique(sizes, return_counts=True)
    for size, count in zip(different[::-1].tolist(), counts[::-1].tolist(), strict=True):
        left = count
        while left > 0:
            fitting = rooms >> size
            room = size + (fitting & -fitting).bit_length() - 1 if fitting else capacity
            # A bin that took one item has the least room of all that another one fits, so it takes the next.
            each = room // size
            num_taken = -(-left // each)
            if fitting:
                taken = with_room[room][:num_taken]
                del with_room[room][:num_taken]
                rooms ^= 0 if with_room[room] else 1 << room
            else:
                taken = list(range(num_bins, num_bins + num_taken))
                num_bins += num_taken
            placed = np.repeat(np.array(taken, np.int64), each)[:left]
            bins[order[place : place + len(placed)]] = placed
            place, left = place + len(placed), left - len(placed)
            in_last = len(placed) - (len(taken) - 1) * each
            for chosen, times in ((taken[:-1], each), (taken[-1:], in_last)):
                if chosen:
                    with_room.setdefault(room - times * size, []).extend(chosen)
                    rooms |= 1 << (room - times * size)
    return bins
