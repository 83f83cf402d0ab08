"""Whole documents put together: which go into one sequence, and what it holds."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tputrain import batches
from tputrain.data import BestFitSequences, DataError
from tputrain.data.best_fit import best_fit

PADDING = 9999


def fit(lengths, sequence_length=8, learned=None):
    """Documents of these lengths; token i of document d is 100 * d + i."""
    tokens = np.concatenate([100 * d + np.arange(n) for d, n in enumerate(lengths)]).astype(np.uint16)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return BestFitSequences(tokens, offsets, sequence_length, 0, "train", learned, padding_id=PADDING)


def one_by_one(sizes, capacity):
    """Best-fit decreasing as it is defined: an item at a time, and of equal rooms any bin."""
    rooms = []
    for size in sorted(sizes, reverse=True):
        fitting = [room for room in rooms if room >= size]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else capacity) - size)
    return sorted(rooms)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60))
@settings(max_examples=200, deadline=None)
def test_each_item_goes_where_least_room_is_left(sizes):
    bins = best_fit(np.array(sizes), 30)
    filled = np.bincount(bins, weights=sizes)
    assert sorted((30 - filled).tolist()) == one_by_one(sizes, 30)


def test_a_sequence_is_whole_documents_and_then_padding():
    batch = fit([5, 3, 6]).batch_of(np.arange(2))
    assert batch["input_ids"].tolist() == [
        [200, 201, 202, 203, 204, 205, PADDING, PADDING],
        [0, 1, 2, 3, 4, 100, 101, 102],
    ]
    assert batch["labels"].tolist() == [
        [201, 202, 203, 204, 205, -100, -100, -100],
        [1, 2, 3, 4, -100, 101, 102, -100],
    ]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5, 0, 0], [0, 1, 2, 3, 4, 0, 1, 2]]
    assert batch["document_ids"].tolist() == [[0] * 6 + [-1] * 2, [0] * 5 + [1] * 3]
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())
    assert batches.size(batch) == 14  # padding does not count


@given(st.lists(st.integers(2, 20), min_size=1, max_size=20))
@settings(max_examples=100, deadline=None)
def test_every_label_of_every_document_comes_once(lengths):
    fitted = fit(lengths)
    batch = fitted.batch_of(np.arange(fitted.num_sequences))
    learned = batch["labels"][batch["labels"] != -100]
    expected = [100 * d + i for d, n in enumerate(lengths) for i in range(1, n)]
    assert sorted(learned.tolist()) == expected


def test_only_a_document_longer_than_a_sequence_is_cut():
    ids = fit([19, 7]).batch_of(np.arange(4))["input_ids"]
    assert sorted(map(tuple, ids.tolist())) == [
        tuple(range(8)),
        tuple(range(8, 16)),
        (16, 17, 18, *[PADDING] * 5),
        (*range(100, 107), PADDING),
    ]


def test_pieces_with_nothing_to_learn_are_left_out():
    learned = np.zeros(12, dtype=bool)
    learned[6] = True  # token 2 of document 1
    fitted = fit([4, 4, 4], learned=learned)
    assert fitted.num_sequences == 1
    labels = fitted.batch_of(np.array([0]))["labels"]
    assert labels.tolist() == [[-100, 102, *[-100] * 6]]
    with pytest.raises(DataError, match="no document with anything to learn"):
        fit([4, 4], learned=np.zeros(8, dtype=bool))
