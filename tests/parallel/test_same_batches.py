"""Ranks that are given different batches, or none any more, all end with one line. Ranks are threads here."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from tests.parallel.rank_threads import ThreadRank, on_ranks
from tputrain import RunConfig, Trainer
from tputrain.errors import UserError
from tputrain.feed import feed_of
from tputrain.loop.next_batches import NextBatches
from tputrain.parallel.same_batches import check_loader, digest_of, given_alike
from tputrain.parallel.world import World

CPU = torch.device("cpu")
DATA = TensorDataset(torch.randn(16, 3), torch.arange(16))
EXPECTED = "expected the same on all ranks, of which each takes its rows: no DistributedSampler"


def batches(count: int) -> list[list[torch.Tensor]]:
    return [[torch.full((4, 3), float(n)), torch.full((4,), n)] for n in range(count)]


def iterate(values: list[Any]) -> Iterator[Any]:
    yield from values


class Part(IterableDataset):
    """Every rank its part, as many write it."""

    def __init__(self, rank: int):
        self.rank = rank

    def __iter__(self) -> Iterator[Any]:
        return iter([DATA[n] for n in range(8 * self.rank, 8 * self.rank + 8)])


def train(loader_of: Callable[[int], Any], steps: int = 6) -> list[Any]:
    """The steps whose batches each rank was given, or what ended it."""

    def run(world: ThreadRank) -> int:
        loader = loader_of(world.rank)
        check_loader(loader, "train_loader", world, equal=True)
        data = NextBatches(feed_of(loader, CPU), CPU, 1, world)
        for step in range(steps):
            data.draw(step)
            data.take()
        return steps

    return on_ranks(2, run)


@pytest.mark.parametrize(
    ("loader_of", "message"),
    [
        (
            lambda rank: iterate(batches(5 - rank)),
            "rank 1: train_loader is a generator that ended after 4 batches and cannot be started anew",
        ),
        (lambda rank: iterate(batches(3)), "train_loader is a generator that ended after 3 batches"),
        (lambda rank: batches(5 - rank), f"train_loader gives rank 1 another batch than rank 0: {EXPECTED}"),
        (lambda rank: [[torch.ones(4, 3 + rank), torch.ones(4)]], "another batch than rank 0"),
        (lambda rank: DataLoader(Part(rank), batch_size=4), "another batch than rank 0"),
        (
            lambda rank: DataLoader(
                DATA, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(rank)
            ),
            "another batch than rank 0",
        ),
        (
            lambda rank: DataLoader(DATA, batch_size=4, sampler=DistributedSampler(DATA, 2, rank)),
            "train_loader: its DistributedSampler gives each rank other samples: expected none",
        ),
        (
            lambda rank: DataLoader(DATA, batch_size=6),
            "the last batch of an epoch: 4 samples|",
        ),
        (
            lambda rank: DataLoader(TensorDataset(*DATA[:15]), batch_size=4),
            "train_loader: the last batch of an epoch: 3 samples do not divide among 2 ranks: .*drop_last",
        ),
        (
            lambda rank: DataLoader(DATA, batch_size=5),
            "train_loader: batch_size: 5 samples do not divide among 2 ranks: expected a multiple of 2",
        ),
    ],
)
def test_other_batches_on_one_rank_end_all_of_them_with_one_line(
    loader_of: Callable[[int], Any], message: str
):
    found = train(loader_of)
    if message.endswith("|"):  # 6, 6 and 4: these do divide
        assert found == [6, 6]
        return
    for error in found:
        assert isinstance(error, UserError), found
        assert re.search(message, str(error)), error
        assert "\n" not in str(error)
    assert str(found[0]) == str(found[1])


def test_loaders_that_are_alike_train_on():
    for shuffled in (False, True):
        seeded = [torch.Generator().manual_seed(3) for _ in range(2)]
        loaders = [DataLoader(DATA, batch_size=4, shuffle=shuffled, generator=each) for each in seeded]
        assert train(lambda rank: loaders[rank], 9) == [9, 9]  # noqa: B023


def test_an_evaluation_that_ends_earlier_on_one_rank_ends_on_all():
    def evaluate(world: ThreadRank) -> int:
        return len(list(given_alike(world, "val_loader", batches(3 - world.rank))))

    for error in on_ranks(2, evaluate):
        assert isinstance(error, UserError)
        assert str(error).startswith(
            "val_loader has ended on rank 1 and gives rank 0 another batch: expected"
        )
    assert on_ranks(2, lambda world: len(list(given_alike(world, "val_loader", batches(3))))) == [3, 3]


def test_a_digest_tells_shapes_and_targets_apart_and_looks_at_no_more_than_a_share_of_large_ones():
    ids = torch.arange(40_000).reshape(4, 10_000)
    batch = {"input_ids": ids, "labels": ids}
    same = {"input_ids": ids + 1, "labels": ids.clone()}
    assert digest_of([batch]) == digest_of([same])  # what is augmented may differ
    assert digest_of([batch]) != digest_of([{"input_ids": ids, "labels": ids + 1}])
    assert digest_of([batch]) != digest_of([{"input_ids": ids.int(), "labels": ids}])
    assert digest_of([batch, batch]) != digest_of([batch])
    assert digest_of([torch.ones(2, 2).bool()]) != digest_of([torch.zeros(2, 2).bool()])
    assert 0 < digest_of([batch]) < 2**63


class Noted(torch.nn.Module):
    """Notes the shapes that it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.shapes = torch.nn.Linear(3, 5), []
        torch.nn.init.constant_(self.linear.weight, 0.1)
        torch.nn.init.constant_(self.linear.bias, 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.shapes.append(tuple(x.shape))
        return self.linear(x) * torch.arange(5)


def samples(count: int, seed: int, with_classes: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=generator)
    classes = torch.randint(0, 5, (count,), generator=generator)
    classes[::3] = -100
    return [x, classes if with_classes else torch.randn(count, 5, generator=generator)]


@pytest.mark.parametrize("with_classes", [False, True])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_ranks_evaluate_with_equal_calls_and_count_each_sample_once(size: int, with_classes: bool):
    data = [samples(count, count, with_classes) for count in (8, 5, 3, 1, 2)]
    loss_fn = None if with_classes else torch.nn.functional.mse_loss

    def evaluate(world: World | None) -> tuple[float, list[Any]]:
        model = Noted()
        trainer = Trainer(model, RunConfig(device="cpu"), val_loader=data, loss_fn=loss_fn)
        trainer.world = trainer.world if world is None else world
        return trainer.validate()["loss"], model.shapes

    expected, _ = evaluate(None)
    found = on_ranks(size, evaluate)
    assert [loss for loss, _ in found] == pytest.approx([expected] * size, rel=1e-6)
    shapes = found[0][1]
    assert all(each == shapes for _, each in found)
    assert sum(rows for rows, _ in shapes) <= sum(-(-len(x) // size) for x, _ in data)
