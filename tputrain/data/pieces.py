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


def cut_documents(
    offsets: np.ndarray, num_tokens: int, longest: int, learned: np.ndarray | None = None
) -> Pieces:
    """The documents that start at `offsets` (the end last) in pieces of `longest` tokens at most, without
    those that hold nothing to learn (`learned`: bool, a token; None: all are).
    """
    lengths = np.diff(offsets)
    counts = -(-lengths // longest)
    within = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    starts = np.repeat(offsets[:-1], counts) + within * longest
    ends = np.repeat(offsets[1:], counts)
    sizes = np.minimum(ends - starts, longest)
    # Token 0 of a document is nobody's label; a piece's labels are its tokens, shifted by one.
    is_label = np.ones(num_tokens + 1, dtype=bool)
    if learned is not None:
        is_label[:-1] = learned
    is_label[offsets] = False
    before = np.concatenate([[0], is_label.cumsum()])
    has_labels = before[np.minimum(starts + sizes, num_tokens) + 1] > before[starts + 1]
    return Pieces(starts[has_labels], sizes[has_labels], ends[has_labels])
