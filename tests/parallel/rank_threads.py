"""Ranks as threads of one process, for what they agree on by way of their hosts."""

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tputrain.batches import Batch
from tputrain.parallel.slices import rounds, slices
from tputrain.parallel.world import World


class ThreadRank(World):
    """The world as one of several ranks sees it, each a thread."""

    def __init__(self, rank: int, size: int, shared: "_Shared"):
        self.rank = self.data_rank = rank
        self.size = self.data_size = size
        self._shared = shared

    def slices(self, batch: Batch) -> list[Batch]:
        return slices(batch, self.size)

    def rounds(self, batch: Batch) -> list[list[Batch | None]]:
        return rounds(batch, self.size)

    def total(self, value: Tensor) -> Tensor:
        return torch.stack(self.of_all(value)).sum(0)

    def largest(self, values: Sequence[int]) -> list[int]:
        return [max(each) for each in zip(*self.of_all(list(values)), strict=True)]

    def of_all(self, value: Any) -> list[Any]:
        return self._shared.exchange(self.rank, value)


class _Shared:
    """What ranks send each other."""

    def __init__(self, size: int):
        self._sent = [[queue.Queue[Any]() for _ in range(size)] for _ in range(size)]

    def exchange(self, rank: int, value: Any) -> list[Any]:
        for each in self._sent[rank]:
            each.put(value)
        return [each[rank].get(timeout=60) for each in self._sent]


def on_ranks(size: int, function: Callable[[ThreadRank], Any]) -> list[Any]:
    """What `function` returns, or the exception that it raises, on each rank."""
    shared = _Shared(size)
    found: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            found[rank] = function(ThreadRank(rank, size, shared))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
        assert not thread.is_alive()
    return found
