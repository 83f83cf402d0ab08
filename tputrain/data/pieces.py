"""Documents cut into pieces that fit a sequence."""

from typing import NamedTuple

import numpy as np


class Pieces(NamedTuple):
    """Runs of tokens, each of one document; int64 arrays, in the order of the text."""

    starts: np.ndarray
    """Where each begins."""
    sizes: np.ndarray
    """How many tokens it has."""
    ends: np.ndarray
    """Where its document ends: the token behind a piece is a label if it lies before that."""


def cut_documents(offsets: np.ndarray, longest: int, learned: np.ndarray | None = None) -> Pieces:
    """The documents that start at `offsets` (the end last) in pieces of `longest` tokens at most, without
    those that hold nothing to learn (`learned`: bool, a token; None: all are).
    """
    lengths = np.diff(offsets)
    counts = -(-lengths // longest)
    within = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    starts = np.repeat(offsets[:-1], counts) + within * longest
    ends = np.repeat(offsets[1:], counts)
    sizes = np.minimum(ends - starts, longest)
    # A piece's labels are its tokens, shifted by one; token 0 of a document is nobody's label.
    first, last = starts + 1, np.minimum(starts + sizes + 1, ends)
    has_labels = last > first
    if learned is not None and has_labels.any():
        borders = np.stack([first[has_labels], last[has_labels]], axis=1).ravel()
        # The border behind the last token is none of an array's places.
        has_labels[has_labels] = np.logical_or.reduceat(np.append(learned, False), borders)[::2]
    return Pieces(starts[has_labels], sizes[has_labels], ends[has_labels])
