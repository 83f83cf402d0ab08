"""Documents laid end to end and cut into sequences."""

import numpy as np
import torch

from tputrain.batches import IGNORED_LABEL
from tputrain.data.config import DataError
from tputrain.data.shuffled import Batch, TokenSequences


class PackedSequences(TokenSequences):
    """A stream of tokens cut into sequences of equal length, with the borders of documents kept.

    `tokens` holds all documents end to end, `offsets` where each starts, and the total length last.
    Sequence i is tokens [i * length, (i + 1) * length): a document that crosses its end goes on in the next
    one as if it started there. What does not fill a sequence at the very end is left out, and so is a
    sequence that holds nothing to learn. Labels are -100 where the next token belongs to another document, or
    is not `learned` (bool, a token; None: all are).
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
        self._tokens, self._offsets, self.seed = np.asarray(tokens), np.asarray(offsets), seed
        self._learned = learned
        self._places = None if learned is None else self._with_labels(learned)
        if self.num_sequences == 0:
            raise DataError(
                f"data.sequence_length={sequence_length} is longer than the {name} text ({len(tokens)} "
                "tokens): shorten it, give more text (data.files) or change data.validation_fraction"
            )

    def batch_of(self, indices: np.ndarray) -> Batch:
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

    def _with_labels(self, learned: np.ndarray) -> np.ndarray:
        """The numbers of the sequences that hold something to learn, which are the only ones that count."""
        used = self.num_sequences * self.sequence_length
        within = learned[1 : used + 1].copy()  # whether the token after each is a label
        ends = self._offsets[1:] - 1
        within[ends[ends < len(within)]] = False
        starts = np.arange(self.num_sequences) * self.sequence_length
        places = np.flatnonzero(np.add.reduceat(within, starts)) if len(starts) else starts
        self.num_sequences = len(places)
        return places
