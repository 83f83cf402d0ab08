"""Which samples a step trains on: those of (seed, step) alone, whatever the ranks and the micro-batches.

No processes: each rank's batches come from loaders that the test makes, as a rank makes its own.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tputrain import rng
from tputrain.batches import Batch
from tputrain.data import DataConfig, ImageBatches, PackedSequences, PaddedSequences
from tputrain.data.images import Images
from tputrain.data.loading import TrainingBatches
from tputrain.feed import feed_of
from tputrain.loop.next_batches import NextBatches
from tputrain.parallel.slices import slices
from tputrain.parallel.world import World

CPU = torch.device("cpu")
SEQUENCES = 16  # of a step
STEPS = 12
LAYOUTS = [(1, 16), (4, 8), (2, 2), (1, 4), (8, 16), (4, 4)]
"""(ranks, sequences of a micro-batch): those of the parts of a run, one after the other."""

Make = Callable[[int, int], Any]
"""A loader for (sequences of a micro-batch, micro-batches of a step)."""


class Rank(World):
    """The world as one of several ranks sees it, and the others are given what it is given."""

    def __init__(self, rank: int, size: int):
        self.rank = self.data_rank = rank
        self.size = self.data_size = size

    def slices(self, batch: Batch) -> list[Batch]:
        return slices(batch, self.size)


def documents(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that occur once each, so that a sequence is known by its first, and offsets."""
    lengths = np.random.default_rng(seed).integers(3, 30, 60)
    return np.arange(lengths.sum()), np.concatenate([[0], lengths.cumsum()])


def packed(sequences: int, micros: int) -> Any:
    return TrainingBatches(PackedSequences(*documents(0), 8, 3, "train"), sequences, micros, "")


def padded(sequences: int, micros: int) -> Any:
    rows = PaddedSequences(*documents(1), 24, 3, "train", padding_id=0, buckets=3)
    return TrainingBatches(rows, sequences, micros, "")


def images(sequences: int, micros: int) -> Any:
    # All of a step at a time: `batch.samples` has no micro-batches.
    pixels = np.arange(50, dtype=np.float32).reshape(50, 1, 1, 1)
    return ImageBatches(Images(pixels, np.zeros(50, dtype=np.int64), 3), sequences * micros, "")


def streamed(sequences: int, micros: int) -> Any:
    rows = "".join(json.dumps({"text": f"<{n}> " + "word " * (n % 9)}) + "\n" for n in range(150))
    Path("rows.jsonl").write_text(rows)
    cfg = DataConfig(source="jsonl", files="rows.jsonl", streaming=True, sequence_length=6, shuffle_block=21)
    return cfg.build(3, lambda line: None).training_batches(sequences, micros)


def streamed_answers(sequences: int, micros: int) -> Any:
    """Of each block some sequences have nothing to learn from, and are left out."""
    rows = [{"prompt": f"what is {n} " * (n % 5), "answer": f"It is {n}."} for n in range(150)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = DataConfig(
        source="jsonl", files="rows.jsonl", streaming=True, format="prompt", sequence_length=6,
        shuffle_block=21, vocab_size=300,
    )  # fmt: skip
    return cfg.build(3, lambda line: None).training_batches(sequences, micros)


def a_users_loader(sequences: int, micros: int) -> Any:
    """Shuffled by PyTorch's generator: batches of one size, each of which is a step's."""
    samples = [{"input_ids": torch.arange(n, n + 2), "labels": torch.ones(2).long()} for n in range(77)]
    return DataLoader(samples, batch_size=sequences * micros, shuffle=True, drop_last=True)  # type: ignore[arg-type]


def samples(batch: Batch) -> Iterator[tuple[float, ...]]:
    values = batch.get("input_ids", batch.get("pixel_values"))
    yield from (tuple(row.flatten().tolist()) for row in values)


def steps_of(
    make: Make, ranks: int, sequences: int, first: int, last: int, position: Any
) -> tuple[list[list[Any]], Any]:
    """The samples of each step in the global order (micro-batch, rank, row), and the position afterwards."""
    micros = 1 if make in (images, a_users_loader) else SEQUENCES // sequences
    found: list[dict[tuple[int, int], list[Any]]] = [{} for _ in range(first, last)]
    positions = []
    for rank in range(ranks):
        feed = feed_of(make(SEQUENCES // micros, micros), CPU)
        batches = NextBatches(feed, CPU, micros, Rank(rank, ranks))
        torch.manual_seed(5)
        if position is not None:
            batches.restore(position["data"])
            rng.restore(CPU, position["rng"])
        for step in range(first, last):
            drawn = batches.draw(step)
            batches.take()
            assert len({tuple(batch["labels"].shape) for batch in drawn.device}) == 1
            for micro, batch in enumerate(drawn.device):
                found[step - first][micro, rank] = list(samples(batch))
        with batches.as_not_drawn():
            positions.append(json.loads(json.dumps({"data": batches.state(), "rng": rng.capture(CPU)})))
    assert all(each == positions[0] for each in positions)
    return [[row for place in sorted(each) for row in each[place]] for each in found], positions[0]


@pytest.mark.parametrize("make", [packed, padded, images, streamed, streamed_answers, a_users_loader])
def test_ranks_and_micro_batches_may_change_at_every_resume_and_the_samples_stay_in_their_order(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    undisturbed, _ = steps_of(make, 1, 4, 0, STEPS, None)
    assert [len(step) for step in undisturbed] == [SEQUENCES] * STEPS
    assert undisturbed[0] != undisturbed[1]
    found: list[list[Any]] = []
    position, length = None, STEPS // len(LAYOUTS)
    for part, (ranks, sequences) in enumerate(LAYOUTS):
        steps, position = steps_of(make, ranks, sequences, part * length, (part + 1) * length, position)
        found += steps
    assert found == undisturbed


def test_an_epoch_has_each_sequence_once():
    steps, _ = steps_of(packed, 4, 8, 0, STEPS, None)
    sequences = packed(1, 1).sequences
    given = [row for step in steps for row in step][: sequences.num_sequences]
    everything = sequences.batch_of(np.arange(sequences.num_sequences))
    assert sorted(given) == sorted(samples(everything))
