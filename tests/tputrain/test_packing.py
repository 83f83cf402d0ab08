"""Packing: what a sequence holds, and which sequences a step sees."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tputrain.data import DataError, PackedSequences
from tputrain.data.shuffled import num_label_bytes

LENGTHS = (5, 3, 8, 1, 7)


def pack(lengths=LENGTHS, sequence_length=4, seed=0):
    """Documents of these lengths; token i of document d is 100 * d + i."""
    tokens = np.concatenate([100 * d + np.arange(n) for d, n in enumerate(lengths)]).astype(np.uint16)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return PackedSequences(tokens, offsets, sequence_length, seed, "train")


def rows(packed):
    return packed.batch_of(np.arange(packed.num_sequences))


def test_a_batch_holds_four_int64_cpu_tensors_of_one_shape():
    batch = pack().batch_at(0, 0, sequences=3)
    assert set(batch) == {"input_ids", "labels", "position_ids", "document_ids"}
    for tensor in batch.values():
        assert tensor.dtype == torch.int64
        assert tensor.shape == (3, 4)
        assert tensor.device.type == "cpu"


def test_sequences_follow_each_other_and_what_does_not_fill_one_is_left_out():
    assert rows(pack())["input_ids"].tolist() == [
        [0, 1, 2, 3],
        [4, 100, 101, 102],
        [200, 201, 202, 203],
        [204, 205, 206, 207],
        [300, 400, 401, 402],
        [403, 404, 405, 406],
    ]


def test_labels_are_the_next_token_of_the_same_document_also_across_the_end_of_a_sequence():
    assert rows(pack())["labels"].tolist() == [
        [1, 2, 3, 4],
        [-100, 101, 102, -100],
        [201, 202, 203, 204],
        [205, 206, 207, -100],
        [-100, 401, 402, 403],
        [404, 405, 406, -100],
    ]


def test_positions_restart_and_document_ids_change_at_each_boundary():
    batch = rows(pack())
    assert batch["position_ids"].tolist()[1] == [0, 0, 1, 2]
    assert batch["position_ids"].tolist()[3] == [0, 1, 2, 3]
    assert batch["document_ids"].tolist()[1] == [0, 1, 1, 1]
    assert batch["document_ids"].tolist()[3] == [0, 0, 0, 0]


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=12),
    sequence_length=st.integers(2, 9),
)
@settings(max_examples=100, deadline=None)
def test_every_label_is_the_token_that_follows_in_its_document(lengths, sequence_length):
    if sum(lengths) < sequence_length:
        return
    batch = rows(pack(lengths, sequence_length))
    inputs, labels = batch["input_ids"], batch["labels"]
    document, place = inputs // 100, inputs % 100
    last = place == torch.tensor(lengths)[document] - 1
    assert torch.equal(labels, torch.where(last, -100, inputs + 1))
    same_document = document[:, 1:] == document[:, :-1]
    assert torch.equal(batch["document_ids"].diff(dim=1) == 0, same_document)
    assert torch.equal(batch["position_ids"].diff(dim=1) == 1, same_document)
    assert (batch["position_ids"][:, 0] == 0).all()


@given(
    sequences=st.integers(1, 7),
    micros=st.integers(1, 3),
    seed=st.integers(0, 2**63),
)
@settings(max_examples=50, deadline=None)
def test_each_epoch_holds_every_sequence_once(sequences, micros, seed):
    packed = pack(lengths=(40,), seed=seed)
    steps = -(-2 * packed.num_sequences // (sequences * micros))
    first_tokens = [
        token
        for step in range(steps)
        for micro in range(micros)
        for token in packed.batch_at(step, micro, sequences, micros)["input_ids"][:, 0].tolist()
    ]
    count = packed.num_sequences
    assert len(set(first_tokens[:count])) == count
    assert len(set(first_tokens[count : 2 * count])) == count


def test_a_step_is_reached_alone_and_depends_on_the_seed():
    lengths = (50, 50, 50)
    walked = [pack(lengths).batch_at(step, 0, 2)["input_ids"] for step in range(40)]
    assert torch.equal(walked[37], pack(lengths).batch_at(37, 0, 2)["input_ids"])
    other = [pack(lengths, seed=1).batch_at(step, 0, 2)["input_ids"] for step in range(40)]
    assert not all(torch.equal(a, b) for a, b in zip(walked, other))


def test_micro_batches_make_up_the_batch_of_the_step():
    packed = pack((90,))
    whole = packed.batch_at(3, 0, sequences=6)["input_ids"]
    parts = [packed.batch_at(3, micro, sequences=2, micros=3)["input_ids"] for micro in range(3)]
    assert torch.equal(whole, torch.cat(parts))


def test_the_order_of_an_epoch_is_pinned():
    """Resuming a run under another version of this library must not reorder its data."""
    order = pack((40,), seed=42).batch_at(0, 0, 10)["input_ids"][:, 0] // 4
    assert order.tolist() == [7, 1, 6, 4, 3, 5, 9, 0, 2, 8]


def test_evaluation_is_the_same_for_every_seed_in_full_batches_and_counts_each_sequence_once():
    batches = [list(pack((43,), seed=seed).eval_batches(4)) for seed in (0, 5)]
    assert len(batches[0]) == 3
    for first, second in zip(*batches):
        assert torch.equal(first["input_ids"], second["input_ids"])
        assert first["input_ids"].shape == (4, 4)
    ids, labels = (torch.cat([batch[name] for batch in batches[0]]) for name in ("input_ids", "labels"))
    assert sorted(ids[(labels != -100).any(1)][:, 0].tolist()) == [4 * number for number in range(10)]
    assert len(list(pack((43,)).eval_batches(4, max_batches=1))) == 1


def test_evaluation_of_less_than_a_batch_is_filled_up_with_rows_that_do_not_count():
    (batch,) = pack((12,)).eval_batches(5)
    assert batch["input_ids"].shape == (5, 4)
    assert (batch["labels"][3:] == -100).all()
    assert sorted(batch["input_ids"][:3, 0].tolist()) == [0, 4, 8]


def test_a_sequence_longer_than_the_text_is_one_clear_line():
    with pytest.raises(
        DataError, match=r"data.sequence_length=64 is longer than the train text \(24 tokens\)"
    ):
        pack(sequence_length=64)


def test_the_bytes_of_a_batch_are_those_of_its_labels():
    packed = pack()
    batch = rows(packed)
    labels = batch["labels"]
    token_bytes = np.arange(500)
    kept = labels[labels != -100]
    assert num_label_bytes(batch, token_bytes) == kept.sum()
