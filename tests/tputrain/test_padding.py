"""Padding: what a row holds, which lengths there are, and which rows a step sees."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tputrain import batches
from tputrain.data import DataError, PaddedSequences

PADDING = 9999


def pad(lengths, sequence_length=8, seed=0, learned=None, buckets=4):
    """Documents of these lengths; token i of document d is 100 * d + i."""
    tokens = np.concatenate([100 * d + np.arange(n) for d, n in enumerate(lengths)]).astype(np.uint16)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return PaddedSequences(
        tokens, offsets, sequence_length, seed, "train", learned, padding_id=PADDING, buckets=buckets
    )


def test_a_row_is_a_document_and_then_padding():
    batch = pad([5, 3]).batch_of(np.array([0, 1, -1]))
    assert batch["input_ids"].tolist() == [
        [0, 1, 2, 3, 4, PADDING],
        [100, 101, 102, PADDING, PADDING, PADDING],
        [PADDING] * 6,
    ]
    assert batch["labels"].tolist() == [
        [1, 2, 3, 4, -100, -100],
        [101, 102, -100, -100, -100, -100],
        [-100] * 6,
    ]
    assert batch["document_ids"].tolist() == [[0, 0, 0, 0, 0, -1], [0, 0, 0, -1, -1, -1], [-1] * 6]
    assert batch["position_ids"].tolist() == [list(range(6))] * 3
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())


def test_padding_does_not_count_as_tokens():
    assert batches.size(pad([5, 3]).batch_of(np.array([0, 1, -1]))) == 8
    ids = torch.zeros(2, 6, dtype=torch.int64)
    assert batches.size({"input_ids": ids}) == 12
    mask = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0]])
    assert batches.size({"input_ids": ids, "attention_mask": mask}) == 7


def test_a_long_document_is_cut_and_the_cut_loses_no_label():
    labels = pad([19]).batch_of(np.arange(3))["labels"]
    assert labels[labels != -100].tolist() == list(range(1, 19))


def test_rows_with_nothing_to_learn_are_left_out():
    learned = np.zeros(12, dtype=bool)
    learned[[6, 8]] = True  # token 2 of document 1, and the first of document 2, which is nobody's label
    padded = pad([4, 4, 4], learned=learned)
    assert padded.num_sequences == 1
    labels = padded.batch_of(np.array([0]))["labels"]
    assert labels.tolist() == [[-100, 102, -100, -100]]


lists_of_lengths = st.lists(st.integers(1, 30), min_size=1, max_size=30).filter(lambda some: max(some) > 1)


@given(
    lengths=lists_of_lengths,
    sequences=st.integers(1, 4),
    micros=st.integers(1, 2),
    buckets=st.integers(1, 4),
    seed=st.integers(0, 2**63 - 1),
)
@settings(max_examples=60, deadline=None)
def test_each_epoch_learns_every_label_once_in_few_lengths(lengths, sequences, micros, buckets, seed):
    padded = pad(lengths, seed=seed, buckets=buckets)
    steps = len(padded._plan(seed, 0, sequences * micros))
    expected = sorted(100 * d + i for d, n in enumerate(lengths) for i in range(1, n))
    shapes = set()
    for epoch in range(2):
        seen = []
        for step in range(epoch * steps, (epoch + 1) * steps):
            batches = [padded.batch_at(step, micro, sequences, micros) for micro in range(micros)]
            assert len({batch["input_ids"].shape for batch in batches}) == 1
            for batch in batches:
                shapes.add(batch["input_ids"].shape)
                labels = batch["labels"]
                learned = labels != -100
                assert torch.equal(labels[learned], batch["input_ids"][learned] + 1)
                assert (batch["document_ids"][learned] == 0).all()
                seen += labels[learned].tolist()
        assert sorted(seen) == expected
    assert len(shapes) <= buckets
    assert {rows for rows, _ in shapes} == {sequences}


def test_a_step_is_reached_alone_and_depends_on_the_seed():
    lengths = [3, 7, 5, 2, 8, 6, 4, 3, 9, 11, 13, 2, 5, 7]
    walked = [pad(lengths).batch_at(step, 0, 2)["input_ids"] for step in range(30)]
    one = pad(lengths)
    assert all(torch.equal(one.batch_at(step, 0, 2)["input_ids"], walked[step]) for step in (29, 3, 17))
    other = [pad(lengths, seed=1).batch_at(step, 0, 2)["input_ids"] for step in range(30)]
    assert not all(torch.equal(a, b) for a, b in zip(walked, other))


def test_rows_of_one_length_waste_little():
    padded = pad([2, 3, 4, 5, 6, 7, 8] * 40, buckets=4)
    batches = [padded.batch_at(step, 0, 4) for step in range(70)]
    kept = sum(int((batch["document_ids"] == 0).sum()) for batch in batches)
    assert kept / sum(batch["input_ids"].numel() for batch in batches) > 0.8


def test_evaluation_is_the_same_for_every_seed():
    first, second = (list(pad([3, 7, 5, 2, 8], seed=seed).eval_batches(2)) for seed in (0, 5))
    assert all(torch.equal(a["labels"], b["labels"]) for a, b in zip(first, second, strict=True))
    assert sum(int((batch["labels"] != -100).sum()) for batch in first) == 2 + 6 + 4 + 1 + 7
    assert len(list(pad([3, 7, 5, 2, 8]).eval_batches(2, max_batches=1))) == 1


def test_text_with_nothing_to_learn_is_one_clear_line():
    with pytest.raises(DataError, match="the train text has no document with anything to learn"):
        pad([1, 1])
